"""Topic lists that the prompt builder puts into its templates; training and held-out lists are disjoint.

One string per topic, separated by "; ". `prompts.py` decides which template may take which list.
"""


def _topics(text: str) -> tuple[str, ...]:
    return tuple(topic.strip() for topic in " ".join(text.split()).split(";"))


TRAIN_SUBJECTS = _topics("""
the water cycle; black holes; photosynthesis; the French Revolution; machine learning; the ocean; volcanoes;
how bread is made; trains; the moon; music theory; chess; gardening; the Roman Empire; electric cars;
healthy food; the internet; rainforests; glaciers; honey bees; the stock market; football; oil painting;
robots; time travel; mountains; school; friendship; wind turbines; the human heart; vaccines; the Silk Road;
dinosaurs; gravity; magnetism; the printing press; democracy; inflation; supply and demand; recycling; solar
panels; coral reefs; deserts; earthquakes; the immune system; sleep; dreams; meditation; yoga; running a
marathon; learning a language; public speaking; job interviews; time management; remote work; writing a CV;
saving money; buying a house; credit cards; taxes; insurance; first aid; the common cold; diabetes;
vitamins; dental care; eyesight; cooking pasta; baking a cake; coffee; tea; chocolate; cheese; olive oil;
rice; spices; fermentation; camping; hiking; cycling; swimming; skiing; surfing; tennis; basketball;
cricket; the Olympic Games; jazz; the piano; the guitar; opera; ballet; cinema; photography; sculpture;
architecture; poetry; Shakespeare; fairy tales; Greek mythology; ancient Egypt; the Vikings; the
Renaissance; the Industrial Revolution; the Cold War; space exploration; Mars; comets; the Big Bang; atoms;
DNA; evolution; bacteria; fungi; whales; penguins; elephants; wolves; dogs; cats; horses; owls; butterflies;
spiders; roses; oak trees; bamboo; compost; clean drinking water; public transport; airports; bridges;
tunnels; ships; submarines; helicopters; bicycles; batteries; computers; operating systems; databases;
computer networks; encryption; passwords; open source software; video games; virtual reality; social media;
online shopping; email; search engines; artificial intelligence; neural networks; statistics; probability;
geometry; calendars; maps; clocks; the metric system; the alphabet; sign language; libraries; museums;
newspapers; elections; the constitution; human rights; the United Nations; refugees; volunteering; charity;
leadership; teamwork; creativity; critical thinking; honesty; courage; patience; happiness; stress; anger;
grief; self-confidence
""")

HELD_OUT_SUBJECTS = _topics("""
lighthouses; the northern lights; sourdough starters; origami; migration of storks; tidal power; the violin;
sand dunes; the Great Wall of China; fossils; paper making; snow leopards; kite flying; beekeeping laws;
escalators; the Suez Canal; pottery; the liver; rainbows; telescopes; mangrove forests; table tennis; hot
air balloons; barcodes; peer review; hydropower; the abacus; octopuses; trade unions; perfumes; marble;
canoes; saffron; comic books; crossword puzzles; greenhouses; the ozone layer; public parks; wheelchairs;
volcanic islands
""")

TRAIN_TASKS = _topics("""
reverses a string; sorts a list of numbers; computes the factorial of n; checks whether a number is prime;
counts words in a text; merges two dictionaries; parses a CSV file; finds the maximum in a list; computes
Fibonacci numbers; removes duplicates from a list; reads a JSON file; converts Celsius to Fahrenheit;
validates an email address; flattens a nested list; finds all files in a folder; computes the mean and
median of a list; checks whether two strings are anagrams; implements binary search; implements a stack;
implements a queue; implements a linked list; inserts a node into a binary tree; traverses a graph breadth
first; finds the shortest path in a grid; computes the greatest common divisor; prints a multiplication
table; replaces vowels in a string; counts the letters in a sentence; rotates a list by k places; splits a
list into chunks; downloads a web page; writes rows to a CSV file; formats a date; measures the time of a
function call; retries a failing call; caches the results of a function; generates random passwords;
shuffles a deck of cards; simulates rolling two dice; draws a triangle of stars; converts a number to Roman
numerals; converts binary to decimal; adds two matrices; multiplies two matrices; transposes a matrix; finds
the second largest number; sums the digits of a number; groups words by their first letter; sorts
dictionaries by a key; finds the longest word; removes punctuation from a text; encodes text with a Caesar
cipher; computes the distance between two points; checks for balanced brackets; logs messages to a file;
parses command line arguments; opens a TCP connection; queries a SQLite database; draws a line chart; reads
an environment variable; computes compound interest; filters even numbers; zips two lists together
""")

HELD_OUT_TASKS = _topics("""
checks whether a string is a palindrome; computes the least common multiple of two numbers; moves zeros to
the end of a list; finds the intersection of two lists; counts the lines of a text file; capitalises every
word of a sentence; computes the area of a polygon; finds the missing number from 1 to n; converts seconds
to hours and minutes; validates a credit card number; computes a running average; builds a histogram of
characters; merges two sorted lists; swaps keys and values of a dictionary; checks whether a year is a leap
year; draws a square of hashes; converts hexadecimal to RGB; renames files in a folder; finds the first
unique character; computes powers without the power operator
""")

TRAIN_CODE_THINGS = _topics("""
list comprehensions; decorators; generators; classes; inheritance; exceptions; context managers; recursion;
lambda functions; type hints; unit tests; virtual environments; regular expressions; threads; async
functions; dictionaries; sets; tuples; string formatting; file handling; modules and imports; pointers in C;
arrays in Java; promises in JavaScript; the DOM; HTML forms; CSS flexbox; SQL joins; SQL indexes; git
branches; git rebase; Docker containers; REST APIs; HTTP status codes; hash tables; linked lists; binary
trees; sorting algorithms; Big O notation; shell pipes; environment variables; memory leaks; garbage
collection; compilers; interpreters; floating point numbers; Unicode
""")

HELD_OUT_CODE_THINGS = _topics("""
list slicing; the walrus operator; named tuples; closures; iterators; properties; operator overloading;
queues; SQL transactions; git tags; websockets; cron jobs; hash functions; bit masks; stack traces;
enumerations; package managers; race conditions; linters; JSON schemas
""")

TRAIN_CHARACTERS = _topics("""
a brave knight; a young inventor; an old fisherman; two sisters; a lost dog; a talking tree; a shy robot; a
retired teacher; a travelling musician; a night watchman; a queen without a crown; a boy who could not
sleep; a clever fox; a lonely astronaut; a baker in a small town; a detective; a ship's cook; a girl with a
red umbrella; a forgetful wizard; a postman; a gardener; twin brothers; a painter; a train driver; a
clockmaker; a farmer's daughter; a librarian; a giant
""")

HELD_OUT_CHARACTERS = _topics("""
a lighthouse keeper; a glass blower; a mapmaker; an apprentice tailor; a one-eyed parrot; a mountain guide;
a beekeeper's son; a bus conductor; a ghost writer; a puppeteer; a stone mason; a tired dragon; a bell
ringer; a ferry captain; a kite maker; a street magician; a violin teacher; a snow plough driver; a young
judge; a stranded sailor
""")

TRAIN_PLACES = _topics("""
in a quiet village; at the edge of a forest; on a distant planet; during a storm; in a city that never
sleeps; in the middle of winter; at an old railway station; on a small island; inside a library; under the
sea; at a busy market; in a house with no doors; on the first day of school; on a long train journey; in the
year 2200; beside a frozen lake
""")

HELD_OUT_PLACES = _topics("""
on a cliff above the sea; in a deserted theatre; during a power cut; at the last bus stop; in a valley full
of fog; on the roof of a hospital; in an abandoned mine; at a harbour at dawn; in a garden behind a wall; on
a bridge at midnight
""")

TRAIN_ITEMS = _topics("""
apples; pencils; books; tickets; stamps; marbles; cookies; chairs; bottles of water; eggs; coins; stickers;
oranges; toy cars; flowers; sandwiches; shirts; bricks; postcards; candles; balloons; muffins; bananas;
notebooks; boxes
""")

HELD_OUT_ITEMS = _topics("""
seashells; lanterns; pears; buttons; pancakes; ribbons; kites; spoons; walnuts; tiles; tulips; envelopes
""")

TRAIN_NAMES = _topics("""
Anna; Ben; Carla; David; Elena; Farid; Grace; Hugo; Irene; Jack; Kofi; Laura; Miguel; Nadia; Omar; Paula;
Quentin; Rosa; Sam; Tina; Umar; Vera; Walter; Yara; Zoe
""")

HELD_OUT_NAMES = _topics("""
Astrid; Bruno; Chiara; Dmitri; Esther; Felix; Gita; Henrik; Ines; Jonas; Katya; Leif; Mirela; Niko; Odile
""")

TRAIN_MATH_TOPICS = _topics("""
fractions; percentages; prime numbers; the Pythagorean theorem; linear equations; quadratic equations; the
area of a circle; the volume of a cylinder; arithmetic sequences; geometric sequences; derivatives;
integrals; logarithms; exponents; square roots; negative numbers; ratios; averages; standard deviation;
permutations; combinations; sets; vectors; matrices; sine and cosine; similar triangles; parallel lines;
polynomials; inequalities; factoring; decimals; rounding; absolute value; complex numbers; proofs by
contradiction; mathematical induction; probability of two events
""")

HELD_OUT_MATH_TOPICS = _topics("""
improper fractions; compound interest; the perimeter of a rectangle; the slope of a line; the median of a
data set; the surface area of a cube; Venn diagrams; scientific notation; the binomial theorem; circular
permutations; the chain rule; systems of equations; unit conversion; the angles of a polygon; expected
value; divisibility rules
""")
