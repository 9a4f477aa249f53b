"""Forms and subjects from which prompts are put together: questions, texts to work on, and code.

A model that writes its own prompts repeats its favourite subjects. These lists lead it to others.
Each draw needs a generator alone, so the prompt of a number is the same in every recording.
"""

import random

SUBJECTS = (
    "photosynthesis|black holes|the water cycle|volcanoes|earthquakes|the immune system|vaccines|"
    "antibiotics|sleep|dreams|memory|the human heart|digestion|muscles and exercise|vitamins|"
    "allergies|the common cold|first aid for burns|a healthy breakfast|yoga for beginners|"
    "learning to swim|training for a long run|riding a bicycle in winter|repairing a flat tyre|"
    "painting a room|cleaning an oven|removing a stain from a shirt|sharpening a knife|"
    "growing tomatoes on a balcony|pruning roses|keeping bees|composting|house plants|"
    "adopting a dog|training a puppy|aquariums|bird watching|owls|whales|octopuses|ants|wolves|"
    "penguins|dinosaurs|mammoths|coral reefs|rainforests|deserts|glaciers|mountains|caves|islands|"
    "the Moon|Mars|comets|the Sun|telescopes|satellites|gravity|magnets|electricity|batteries|"
    "solar panels|wind power|nuclear energy|steam engines|bridges|tunnels|skyscrapers|elevators|"
    "airplanes|helicopters|submarines|trains|electric cars|traffic jams|maps|compasses|clocks|"
    "calendars|the alphabet|printing|paper|books for teenagers|poetry|fairy tales|detective novels|"
    "theatre|film music|jazz|the piano|the violin|choirs|dancing|photography|oil painting|"
    "sculpture|pottery|knitting|sewing|woodworking|chess|card games|crossword puzzles|football|"
    "tennis|table tennis|rowing|climbing|skiing|sailing|fishing|camping with children|hiking|"
    "packing a suitcase|a cheap holiday|train journeys|night markets|street food|cheese|chocolate|"
    "coffee|tea|soup|pasta|rice|curry|pizza dough|pancakes|salad dressing|vegetarian dinners|"
    "leftovers|food for a picnic|a birthday cake|school lunches|the Roman Empire|ancient Egypt|"
    "the Middle Ages|the Silk Road|the French Revolution|the Industrial Revolution|Vikings|"
    "the Cold War|the history of money|the history of the bicycle|pirates|knights|castles|"
    "democracy|elections|constitutions|the United Nations|human rights|taxes|inflation|interest|"
    "insurance|saving for a house|the stock market|starting a small shop|a bakery|a flower shop|"
    "customer complaints|job interviews|a new manager|meetings|working from home|time management|"
    "negotiating a salary|public speaking|a wedding speech|shyness|friendship|loneliness|anger|"
    "forgiveness|a difficult neighbour|teenagers and phones|bedtime stories|homework|exams|"
    "learning Spanish|learning Japanese|sign language|grammar|punctuation|essays|philosophy|"
    "Socrates|ethics|logic|probability|prime numbers|fractions|percentages|geometry|algebra|"
    "statistics|graphs|encryption|passwords|the internet|search engines|e-mail|spam|computer mice|"
    "robots|machine learning|databases|operating systems|video games|open source|3D printing|"
    "recycling|plastic in the sea|air pollution|drinking water|floods|droughts|forest fires|"
    "storms|rainbows|snow|fog|tides|rivers|soil|seeds|mushrooms|apples|bananas|salt|sugar|honey|"
    "oxygen|carbon|gold|diamonds|rubber|cotton|wool|leather|soap|perfume|candles|mirrors|lenses"
).split("|")
"""Things to ask about."""
QUESTIONS = (
    "What is the most important thing to know about {}?",
    "Explain {} in simple words.",
    "Explain {} to a student on the first day.",
    "Give me five facts about {}.",
    "List three advantages and three disadvantages that have to do with {}.",
    "Write a short paragraph about {}.",
    "Write a poem of eight lines about {}.",
    "Write a dialogue between two friends about {}.",
    "Write an e-mail to a colleague about {}.",
    "Write a short, funny story in which {} plays a part.",
    "Write a letter to a newspaper about {}.",
    "Make a list of ten words that belong to {}, each with its meaning.",
    "Give me a plan of one week for learning about {}.",
    "Which mistakes do people often make with {}?",
    "What are common misunderstandings about {}?",
    "How has {} changed over the last hundred years?",
    "Why should people care about {}?",
    "Describe {} in exactly two sentences.",
    "Invent a quiz with four questions and answers about {}.",
    "Compare {} with {}.",
    "What do {} and {} have in common?",
    "I know nothing about {}. Where do I begin?",
    "My daughter asked me about {}. What can I tell her?",
    "Give me a step-by-step guide on {}.",
    "Suggest a title and an outline for an article about {}.",
    "Write an advertisement that has to do with {}.",
    "Give arguments for and against spending public money on {}.",
    "Make a table with three columns about {}.",
    "How would you describe {} to a blind person?",
    "What would the world be like without {}?",
    "Write the introduction of a talk about {}.",
    "Answer in one word: what do you think of first when you hear of {}?",
    "Is it true that {} matters less today than in the past? Give reasons.",
    "Which tools and supplies do I need for work on {}?",
    "Pretend to be an expert on {} and greet your audience.",
)
"""Questions with a place for each subject."""
TEXTS = (
    "Write a news report of six sentences about {}. Invent names, places and numbers.",
    "Write a short text for an encyclopedia about {}.",
    "Write a product description that has to do with {}. Name a price and a maker.",
    "Write a report about a visit that had to do with {}. Name the people and the dates.",
    "Write a short biography of an invented expert on {}.",
    "Write minutes of a meeting about {}, with names and decisions.",
    "Write a complaint to a company about {}, with an order number and dates.",
    "Write a diary entry about {}.",
)
"""Requests for a text that another prompt works on."""
TEXT_TASKS = (
    "Summarize the text below in one sentence.",
    "Summarize the following in three sentences, for a reader in a hurry.",
    "What are the main points of this text? Use a list.",
    "Rewrite this text so that a beginner understands it.",
    "Rewrite the following text in a formal style.",
    "Make this text shorter, and keep all names and numbers.",
    "Correct the mistakes in this text, and print it again.",
    "Which people, places and numbers does this text mention? Give a list.",
    "Give this text a title, and name its likely readers.",
    "Write three questions about this text, with their answers.",
    "Continue the following text with one more paragraph.",
    "Turn this text into an e-mail to a friend.",
    "What does the text say, and what does it leave out?",
    "Write the key facts of this text as JSON.",
)
FOLLOW_UPS = (
    "Can you say that in fewer words?",
    "Give me an example.",
    "Why is that?",
    "Please write it again, in a friendlier tone.",
    "Thank you! What should I do next?",
    "Are you sure? Check your answer.",
    "Which of these is the most important one?",
    "Explain the first point in more detail.",
    "Can you put this into a table?",
    "And what if I have very little time?",
    "What are the risks?",
    "Turn this into a list of steps.",
)
"""Second messages of a user."""
PROGRAMS = (
    "counts the words of a text|finds the longest line of a file|sorts a list of people by age|"
    "removes duplicates from a list|merges two sorted lists|checks whether a text is a palindrome|"
    "computes the factorial of a number|finds all prime numbers up to a limit|"
    "converts Celsius to Fahrenheit|reads a configuration file|writes rows to a CSV file|"
    "computes the median of a list|groups words by their first letter|reverses a linked list|"
    "searches a sorted list|checks a password|counts the vowels of a text|"
    "computes a moving average|flattens a nested list|validates an e-mail address|"
    "computes the distance between two points|draws a triangle of stars|adds two matrices|"
    "formats a number of seconds|splits a bill among friends|keeps a list of tasks|"
    "converts a number to Roman numerals|finds the most frequent letter|rotates a list|"
    "computes compound interest|counts the days between two dates|parses a line of a log"
).split("|")
"""What a function does."""
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "Go", "SQL")
CODE_QUESTIONS = (
    "Write a {} function that {}.",
    "Write a {} program that {}, with comments.",
    "How do I write {} code that {}? Explain each line.",
    "Write a test for a {} function that {}.",
)
CODE_TASKS = (
    "Explain what this code does.",
    "Add a docstring and comments to this code. Print the whole code.",
    "Find mistakes in the code below and correct them.",
    "Give the functions and variables of this code better names, and print it again.",
    "Make the following code shorter.",
    "Write tests for this code.",
    "Change this code so that it prints each step. Give me the complete code.",
    "Handle wrong input in this code, and leave the rest as it is.",
)


def question(rng: random.Random) -> str:
    """Draw a question about one or two subjects, or about a program."""
    if rng.random() < 0.15:
        return rng.choice(CODE_QUESTIONS).format(rng.choice(LANGUAGES), rng.choice(PROGRAMS))
    form = rng.choice(QUESTIONS)
    return form.format(*rng.sample(SUBJECTS, form.count("{}")))


def text_request(rng: random.Random) -> tuple[str, str]:
    """Draw a request for a text, and a task about the text."""
    return rng.choice(TEXTS).format(rng.choice(SUBJECTS)), rng.choice(TEXT_TASKS)


def code_request(rng: random.Random) -> tuple[str, str]:
    """Draw a request for code, and a task about the code."""
    code = f"Write a {rng.choice(LANGUAGES)} function that {rng.choice(PROGRAMS)}. Only the code."
    return code, rng.choice(CODE_TASKS)


def follow_up(rng: random.Random) -> tuple[str, str]:
    """Draw a question, and the user's next message after the answer."""
    return question(rng), rng.choice(FOLLOW_UPS)
