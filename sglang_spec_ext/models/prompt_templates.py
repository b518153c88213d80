"""Prompt templates; those for training and those for the held-out prompts are disjoint.

Fields: s, t subjects; k coding tasks; c coding concepts; h, g characters; p places; i items; n names;
m mathematical topics; a, b, d, e numbers; x a quoted text or function.
"""

TRAIN_CHAT = (
    "Explain {s} to a child.",
    "What is {s}?",
    "List ten facts about {s}.",
    "Give me five tips about {s}.",
    "What are the advantages and disadvantages of {s}?",
    "Summarise what you know about {s}.",
    "I want to learn about {s}. Where should I start?",
    "Why is {s} important?",
    "Write an email to a friend about {s}.",
    "What is the history of {s}?",
    "Answer in one paragraph: how does {s} affect our lives?",
    "Write a quiz about {s}.",
    "Make a step-by-step plan for a class about {s}.",
    "What do people often get wrong about {s}?",
    "Compare {s} with {t}.",
    "Tell me something surprising about {s}.",
    "How are {s} and {t} connected?",
    "Can you recommend a way to teach {s} to beginners?",
    "Describe {s} in three sentences.",
)

TEST_CHAT = (
    "What would you tell a tourist about {s}?",
    "Give a short definition of {s} and two examples.",
    "I have a presentation on {s} tomorrow. What should I mention?",
    "Who would enjoy reading about {s}, and why?",
    "What questions do experts still ask about {s}?",
    "Please write a frequently asked questions page for {s}.",
)

TRAIN_CODE = (
    "Write a Python function that {k}.",
    "Write a JavaScript function that {k}.",
    "Write a unit test for a function that {k}.",
    "Write a C program that {k}.",
    "Explain step by step how to write code that {k}.",
    "Show a Java method that {k}.",
    "Explain {c} with an example.",
    "What are common mistakes with {c}?",
    "When should I use {c}?",
    "Write a short tutorial about {c}.",
)

TEST_CODE = (
    "Give me a Python script that {k}, with comments.",
    "I need a helper which {k}. Please write it in Python and explain it.",
    "Show me a small example of {c} and describe what each line does.",
    "What is the difference between good and bad use of {c}?",
)

TRAIN_PROSE = (
    "Write a short story about {h} {p}.",
    "Write a poem about {s}.",
    "Write an essay about {s}.",
    "Write the first chapter of a novel about {h} {p}.",
    "Write a letter from {h} to a friend.",
    "Describe a place: it is morning {p}.",
    "Write a dialogue between {h} and {g}.",
    "Write a speech about {s}.",
    "Write a newspaper article about {s}.",
    "Continue this story: Once upon a time, {p}, there was {h}.",
    "Write a diary entry of {h} {p}.",
)

TEST_PROSE = (
    "Tell a tale in which {h} finds a secret {p}.",
    "Write a monologue spoken by {h} {p}.",
    "Compose a magazine feature on {s}.",
    "Write a scene: {h} meets {g} {p}.",
)

TRAIN_MATHS = (
    "{n} has {a} {i} and buys {b} more. How many {i} does {n} have?",
    "What is {a} plus {b}? Explain.",
    "What is {a} times {d}? Show the steps.",
    "Solve for x: {d}x + {e} = {a}.",
    "What is {d} percent of {b}0?",
    "{n} shares {a} {i} equally among {d} friends. How many does each friend get?",
    "Explain {m} with an example.",
    "A train travels {a} km in {d} hours. What is its average speed?",
    "Give me three exercises about {m} with solutions.",
    "{n} buys {d} {i} at {e} dollars each. How much does {n} pay?",
    "How do I work with {m}?",
    "Is {a} a prime number? Explain your reasoning.",
    "Write the numbers from {d} to {a} in steps of {e}.",
)

TEST_MATHS = (
    "{n} had {b} {i}, gave {d} to a neighbour and lost {e}. How many {i} are left?",
    "A box holds {d} {i}. How many boxes are needed for {a} {i}?",
    "Find y if {e}y - {d} = {b}.",
    "Teach me {m} in simple words, then give one worked problem.",
    "The sum of two numbers is {a} and one of them is {d}. Find the other.",
    "A recipe needs {d} {i} for {e} people. How many for {b} people?",
)

TRAIN_ABOUT_TEXT = (
    "Summarise this text:\n\n{x}",
    "Rewrite this text in simpler words:\n\n{x}",
    "What does this documentation say?\n\n{x}",
    "Turn this into a list of bullet points:\n\n{x}",
    "Write three questions about this text:\n\n{x}",
)

TEST_ABOUT_TEXT = (
    "Give this passage a title and explain it:\n\n{x}",
    "What is the main idea here?\n\n{x}",
)

TRAIN_ABOUT_CODE = (
    "Explain this Python code:\n\n```python\n{x}\n```",
    "Write a docstring for this function:\n\n```python\n{x}\n```",
    "Rewrite this function with comments:\n\n```python\n{x}\n```",
    "Are there bugs in this code?\n\n```python\n{x}\n```",
)

TEST_ABOUT_CODE = ("What would you improve in this code, and how?\n\n```python\n{x}\n```",)
