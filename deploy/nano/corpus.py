"""The text that the nano tokenizer is trained on: ours, fixed, and about as wide as a small vocabulary can use."""

PROSE = """
A quartet is four players and one piece of music. The first violin leads, but it does not decide alone: every player
hears the others, and the four of them breathe together. If one stops, the music stops. If one is late, everybody
waits. So they agree on the page, the bar and the tempo before they begin, and then they only listen and play.

This little model is a quartet too. It has the shape of a large language model and none of its knowledge. Its
weights are random numbers, drawn from a seed, so its answers are words without a meaning; but the way from a
question to an answer is the real one. A request comes in over HTTP, a template turns the messages into a prompt,
the tokenizer cuts the prompt into pieces, and the scheduler gives the sequence its pages. Then four processes
compute one step after another, and each step adds one token to the stream. When the reader leaves, the work ends.

Why build something so small? Because a small thing can be tested whole. It starts in a second on any machine, it
needs no graphics card, and when it is wrong we can see where. What is true of the small one must hold for the large
one: the same code, the same plan, the same tests.

What is the weather in Paris today? The weather is mild, with some wind from the west and a little rain in the
evening. Tomorrow will be sunny. How many days are there in a year? There are 365 days, and 366 in a leap year. Can
you write a short story about the sea? Once upon a time there was an old captain who had never learned to swim. He
loved the water, and the water, he believed, loved him. Please explain how a computer works. A computer reads an
instruction, does what it says, and reads the next one. That is all; the rest is speed. Thank you very much! You're
welcome.

Here is a function in Python that returns the sum of two numbers:

def add(first, second):
    return first + second

for index in range(10):
    print(index, add(index, 1))

{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}, "type": "object"}

The user asks, the model thinks, the model answers. A thought is not part of the answer. system, user, model,
assistant, tool, thought, value, true, false, null, string, number, response, call, declaration, properties,
parameters, required, content, message, function, error, result.
"""

WORDS = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give air line set own under read last never
us left end along while might next sound below saw something thought both few those always looked show large often
together asked house world going want school important until form food keep children feet land side without boy once
animals life enough took sometimes four head above kind began almost live page got earth need far hand high year
mother light parts country father let night following picture being study second eyes soon times story boys since
white days ever paper hard near sentence better best across during today others however sure means knew try told
young miles sun ways thing whole hear example heard several change answer room against top turned learn point city
play toward five using himself usually morning music question language machine
"""

COMMON_WEIGHT = 3
