"""Pictures that the nano towers learn to see, with questions about them: one coloured shape or digit on a plain ground."""

import base64
import io
import random
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "red": (215, 35, 35),
    "green": (35, 150, 50),
    "blue": (40, 70, 215),
    "yellow": (240, 215, 40),
    "purple": (135, 45, 160),
    "orange": (245, 135, 25),
}
GROUNDS = ((255, 255, 255), (235, 235, 235), (20, 20, 20), (120, 120, 120))
SHAPES = ("square", "circle", "cross", "diamond")  # words that the frozen text model can spell
THINGS = (*SHAPES, *"0123456789")
_SIZES = (64, 96, 128, 192, 256)  # of the shorter side
_ASPECTS = (1.0, 1.0, 1.0, 4 / 3, 3 / 4)
_QUESTIONS = {
    "colour": ("What colour is it?", "What colour is the {0}?"),
    "shape": ("Which shape do you see?", "What shape is it?"),
    "digit": ("Which digit do you see?", "What digit is it?"),
}


@dataclass(frozen=True)
class Picture:
    """A picture, a question about it, and the one right answer."""

    image: Image.Image
    colour: str
    thing: str
    question: str
    answer: str
    skill: str

    @property
    def png(self) -> bytes:
        stream = io.BytesIO()
        self.image.save(stream, "PNG")
        return stream.getvalue()


def size(rng: random.Random) -> tuple[int, int]:
    """A width and a height."""
    short, aspect = rng.choice(_SIZES), rng.choice(_ASPECTS)
    return (round(short * aspect), short) if aspect >= 1 else (short, round(short / aspect))


def draw(rng: random.Random, width: int, height: int) -> Picture:
    """Any of them."""
    colour, thing = rng.choice(list(COLOURS)), rng.choice(THINGS)
    noun = "digit" if thing.isdigit() else thing
    skill = rng.choice(("colour", "digit" if thing.isdigit() else "shape"))
    answer = colour if skill == "colour" else thing
    question = rng.choice(_QUESTIONS[skill]).format(noun)
    return Picture(paint(rng, width, height, colour, thing), colour, thing, question, answer, skill)


def drawn(rng: random.Random, count: int) -> list[Picture]:
    """So many of any size."""
    return [draw(rng, *size(rng)) for _ in range(count)]


def look(client: Any, picture: Picture) -> tuple[str, str]:
    """The right answer, and the one that openai's client gets."""
    url = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": picture.question}]
    model, messages = client.models.list().data[0].id, [{"role": "user", "content": parts}]
    reply = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=16)
    return picture.answer, reply.choices[0].message.content


def paint(rng: random.Random, width: int, height: int, colour: str, thing: str) -> Image.Image:
    """The thing fills about 70 to 82 hundredths of the shorter side, near the middle."""
    image = Image.new("RGB", (width, height), _near(rng, rng.choice(GROUNDS), 10))
    half = min(width, height) * rng.uniform(0.7, 0.82) / 2
    x, y = (side / 2 + rng.uniform(-0.1, 0.1) * (side / 2 - half) for side in (width, height))
    pen, ink = ImageDraw.Draw(image), _near(rng, COLOURS[colour], 20)
    if thing.isdigit():
        font = ImageFont.load_default(size=2.4 * half)
        pen.text((x, y), thing, fill=ink, font=font, anchor="mm", stroke_width=round(rng.choice((0, 1, 2)) * half / 24))
    elif thing == "circle":
        pen.ellipse((x - half, y - half, x + half, y + half), fill=ink)
    else:
        pen.polygon([(x + half * u, y + half * v) for u, v in _CORNERS[thing]], fill=ink)
    return image


_THIN = 0.3
_CORNERS = {
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "diamond": ((0, -1), (1, 0), (0, 1), (-1, 0)),
    "cross": (
        *((-_THIN, -1), (_THIN, -1), (_THIN, -_THIN), (1, -_THIN), (1, _THIN), (_THIN, _THIN)),
        *((_THIN, 1), (-_THIN, 1), (-_THIN, _THIN), (-1, _THIN), (-1, -_THIN), (-_THIN, -_THIN)),
    ),
}


def _near(rng: random.Random, colour: tuple[int, int, int], reach: int) -> tuple[int, ...]:
    return tuple(min(255, max(0, part + rng.randint(-reach, reach))) for part in colour)
