"""Who and what the exercises are about: a change here changes what the trained models were trained on."""

NAMES = (
    "Anna",
    "Ben",
    "Carl",
    "Dora",
    "Emil",
    "Fay",
    "Gus",
    "Hana",
    "Ivan",
    "Jane",
    "Lena",
    "Max",
    "Nora",
    "Otto",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Uma",
    "Vera",
    "Will",
    "Yara",
    "Zoe",
)
CITIES = (
    "Paris",
    "Rome",
    "Oslo",
    "Lima",
    "Cairo",
    "Tokyo",
    "Berlin",
    "Madrid",
    "Vienna",
    "Dublin",
    "Athens",
    "Delhi",
    "Quito",
    "Seoul",
    "Prague",
    "Lisbon",
)
JOBS = ("baker", "pilot", "nurse", "farmer", "painter", "teacher", "doctor", "driver", "singer", "writer", "cook", "judge")
ITEMS = ("bread", "milk", "tea", "rice", "salt", "cheese", "honey", "soap", "paper", "lamp", "chair", "book")
WEATHER = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")
ADJECTIVES = ("old", "small", "big", "red", "blue", "quiet", "young", "happy", "dark", "white", "cold", "kind")
NOUNS = (
    "fox",
    "bird",
    "king",
    "cat",
    "girl",
    "boy",
    "horse",
    "bear",
    "fish",
    "child",
    "queen",
    "dog",
    "mother",
    "father",
    "man",
    "woman",
)
VERBS = ("saw", "found", "followed", "loved", "watched", "called", "helped", "carried", "heard", "met")
PLACES = (
    "in the garden",
    "near the river",
    "under the tree",
    "by the sea",
    "on the hill",
    "at the gate",
    "behind the house",
    "in the snow",
)
