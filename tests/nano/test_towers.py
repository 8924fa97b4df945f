"""The trained towers, in our engine, on pictures that nobody was trained on."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from PIL import Image

from deploy.edge.media.media_preparer import media_items
from deploy.edge.media.rasters import prepare_image
from deploy.edge.media.tasks import DecodeTask
from deploy.models.nano import trained
from deploy.models.resolve import resolve
from engine.front.text import TextProcessor
from engine.protocol import GenerateRequest, SamplingParams, pack_tokens
from engine.rank.builder import build
from engine.vision_geometry import read_vision
from tests.support.engine.answers import answers, texts
from tests.support.engine.media import MEMORY
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import config_of
from training.pictures import Picture, drawn

pytestmark = pytest.mark.cpu

PAGES = (60, 40)
SEEING = [member for member in trained() if read_vision(resolve(f"nano:{member}"))]


def asked(number: int, picture: Picture, text: TextProcessor) -> GenerateRequest:
    """As the edge makes it of a PNG and a question behind it."""
    image = prepare_image(DecodeTask(), picture.png)
    parts = [{"type": "image"}, {"type": "text", "text": picture.question}]
    ids = text.render_chat([{"role": "user", "content": parts}], media=[("image", image.text)])
    params = SamplingParams(max_tokens=16, temperature=0.0, stop_ids=(106,))
    return GenerateRequest(id=number, prompt=pack_tokens(ids), params=params, media=MEMORY.place(media_items(ids, [image], text)))


def right(member: str, pictures: Sequence[Picture]) -> int:
    """How many are answered rightly, greedily."""
    config = config_of(resolve(f"nano:{member}"), 1, max_len=512, pages=PAGES)
    runner, text = build(single(config), PAGES), TextProcessor.load(resolve(f"nano:{member}"))
    given, _, _ = answers(partial(run, runner), config, [asked(at, picture, text) for at, picture in enumerate(pictures)])
    said = {number: text.decode(tokens[:-1]) for number, (tokens, *_) in texts(given).items()}
    return sum(said[number] == picture.answer for number, picture in enumerate(pictures))


@pytest.mark.parametrize("member", SEEING)
def test_pictures_are_seen(member: str) -> None:
    """Of fifteen questions about colours, shapes and digits, at most one is answered wrongly."""
    assert right(member, drawn(random.Random("towers"), 15)) >= 14


@pytest.mark.skipif(not SEEING, reason="no trained model has a tower yet")
def test_wrong_channels_are_noticed() -> None:
    """With red and blue swapped (planted), most answers that name a colour are wrong."""
    pictures = [
        replace(one, image=Image.fromarray(np.asarray(one.image)[..., ::-1]))
        for one in drawn(random.Random("towers"), 30)
        if one.colour in one.answer
    ]
    assert right(SEEING[0], pictures) < len(pictures) / 2
