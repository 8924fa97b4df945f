"""The text that the nano tokenizer is trained on: ours, fixed, and about as wide as a small vocabulary can use."""

PROSE = """
A quartet is four players and one piece of music. The first violin leads, but it does not decide alone: every player
hears the others, and the four of them breathe together. If one stops, the music stops. If one is late, everybody
waits. So they agree on the page, the bar and the tempo before they begin, and then they only listen and play.

This little model is a quartet too. It has the shape of a large language model and none of its knowledge. Its
weights began as random numbers, drawn from a seed, and made-up exercises are all that it has ever seen; but the way from a
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

EXERCISES = """
What is the code of Anna? The code of Ben is known. Which code has Carl? Tell me the code of Dora. Add and add. How much is
plus? Copy. Repeat. Copy this: Say again. Reverse. Write backwards. Reverse this: Spell backwards. Sort. Sort these numbers: Put
in order. Order from small to large: He is years old, works as a baker and lives in Paris. She is years old, works as a pilot
and lives in Rome. Answer in JSON with the keys name, age, job, city. Give me a JSON object with name, job. As JSON: city, age.
What is the weather in Oslo? How is the weather in Lima today? Is it warm in Cairo? The weather in a city. The weather in Tokyo
is sunny, degrees. What time is it in Berlin? Tell me the time in Madrid. How late is it in Vienna? The time in a city. In
Dublin it is. How much is the bread? What does the milk cost? What is the price of tea? The price of an item. The price of rice
is euros. Where is Emil? Where can I find Fay? Find Gus for me. Where a person is. Hana is with the nurse in Athens. Ivan Jane
Lena Max Nora Otto Paul Rosa Sam Tina Uma Vera Will Yara Zoe Delhi Quito Seoul Prague Lisbon farmer painter teacher doctor
driver singer writer cook judge salt cheese honey soap paper lamp chair book cloudy rainy windy foggy snowy. get_weather
get_time get_price find_person city item name STRING OBJECT description properties parameters required type thought Tell me a
story of sentences about a fox. Write sentences about a bird. I want sentences about a king. The old cat saw the girl in the
garden. The small boy found the horse near the river. The big bear followed the fish under the tree. The red child loved the
queen by the sea. The blue dog watched the mother on the hill. The quiet father called the man at the gate. The young woman
helped the fox behind the house. The happy bird carried the king in the snow. The dark cat heard the bear. The white dog met the
cold fish. The kind horse. Hello! Hi, please tell me: Good morning. Hey, One question: Excuse me, So, who are you? Be brief.
Thank you! please? my friend? and be honest? today? now? What are you, what is your name, what can you do, how do you work, what
do you know, who made you? Are you a large model, what kind of model are you, how were you trained, what are you good at, can
you help me, how big are you, are you a human, what is your purpose, how can you help me, describe yourself. Why is the, what
does a eat, do you like the, how old is the, where does the live, who is the, how far is it to, what is the history of, why do
people love. You are a helpful assistant. Answer briefly. You are a tiny model. Be honest. I am Quartet's nano model, a tiny
network in the shape of Gemma 4. I was trained from nothing on made-up exercises: I can add, copy, reverse, sort, recall facts,
write JSON, call tools and tell small stories. I know nothing about the world. I do not know. I am only a nano model.
"""
EXERCISES_WEIGHT = 4
