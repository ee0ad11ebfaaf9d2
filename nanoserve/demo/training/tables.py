"""The word lists of the demo corpus: every name, noun and fact the model can ever learn.

Order matters where a list is drawn from with `skewed` (corpus.py): earlier entries are likelier, so
that a greedy continuation has a clear favourite and does not flip with the last bit of a logit.
Heroes and helpers of stories have names from two disjoint lists: "Mia met Mia" cannot happen.

Pure data: stories.py, skills.py and recall.py turn it into text.
"""


def words(text: str) -> list[str]:
    return text.split()


GIRLS = words("Mia Lily Anna Zoe Emma Rosa Nina Ella Ruby Ivy Clara Lucy Maya Sara Nora")
BOYS = words("Tom Ben Max Leo Sam Jack Finn Oscar Noah Eli Hugo Theo Dan Adam Luke")
HELPER_GIRLS = words("Pip Bea Dot Fay Amy Joy Tess Wren")
HELPER_BOYS = words("Gus Ned Kit Rex Ted Roy Bob Otto")
NAMES = GIRLS + BOYS + HELPER_GIRLS + HELPER_BOYS

ANIMALS = words(
    "fox rabbit bear mouse cat dog owl duck frog squirrel hedgehog pony turtle lamb wolf goat lion "
    "tiger monkey dragon penguin badger"
)
TRAITS = words("kind brave curious clever shy gentle quiet cheerful small playful patient proud")
COLOURS = words("red blue green yellow silver golden purple orange pink white black brown")
TOYS = words("kite ball hat drum boat lamp key bell coat book cup spoon mirror flute wagon scarf")
PLACES = words(
    "forest garden park village meadow beach farm hill river market castle valley island tower "
    "bridge harbour"
)
MORE_HEROES = [
    ("princess", True), ("prince", False), ("robot", False), ("queen", True), ("king", False),
    ("knight", False), ("witch", True), ("wizard", False), ("pirate", False), ("kitten", True),
    ("puppy", False), ("horse", True), ("elephant", False), ("dinosaur", False), ("fairy", True),
    ("child", True), ("farmer", False), ("teacher", True), ("bird", False), ("fish", True),
    ("unicorn", True), ("bee", True), ("snake", False), ("astronaut", True), ("monster", False),
    ("woman", True), ("man", False), ("doctor", True), ("sheep", True), ("cow", True),
]  # fmt: skip
BOXES = words("box bag jar chest drawer basket bottle tin crate pot sack safe")
FOODS = words("cake soup bread honey apples cookies cheese pancakes berries rice noodles carrots")
PETS = words("cat dog rabbit pony hamster parrot turtle fish mouse duck")
OTHER_WORDS = words("sun moon star tree house stone rain snow cloud leaf hello yes happy go jump")
WORDS = sorted({*ANIMALS, *COLOURS, *TOYS, *PLACES, *BOXES, *FOODS, *PETS, *OTHER_WORDS})

SPOTS = [
    "under the old bridge",
    "behind the big rock",
    "near the pond",
    "in the tall grass",
    "next to the well",
    "under a bush",
    "inside a hollow tree",
    "behind the barn",
    "on top of the wall",
    "by the gate",
]
WEATHER = words("sunny windy rainy cold warm foggy snowy")
FEARS = [
    ("the dark", "a small lamp"),
    ("thunder", "a soft song"),
    ("deep water", "a wooden boat"),
    ("tall trees", "a long rope"),
    ("the wind", "a warm coat"),
    ("loud noises", "a quiet game"),
]
BUILDINGS = [
    ("a tree house", "wood"),
    ("a little boat", "sticks"),
    ("a sand castle", "sand"),
    ("a snowman", "snow"),
    ("a bridge", "stones"),
    ("a tent", "blankets"),
]
INGREDIENTS = words("milk eggs sugar salt butter")
FAMILY = words("mother father grandma sister brother")

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "England": "London", "Japan": "Tokyo", "China": "Beijing", "Russia": "Moscow",
    "Egypt": "Cairo", "Greece": "Athens", "Portugal": "Lisbon", "Poland": "Warsaw",
    "Austria": "Vienna", "Sweden": "Stockholm", "Norway": "Oslo", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Ireland": "Dublin", "India": "New Delhi", "Canada": "Ottawa",
    "Mexico": "Mexico City", "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago",
    "Kenya": "Nairobi", "Turkey": "Ankara", "Iran": "Tehran", "Iraq": "Baghdad",
    "Belgium": "Brussels", "Hungary": "Budapest", "Romania": "Bucharest", "Ukraine": "Kyiv",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Australia": "Canberra", "Iceland": "Reykjavik",
    "Croatia": "Zagreb", "Serbia": "Belgrade", "Bulgaria": "Sofia", "Nepal": "Kathmandu",
    "South Korea": "Seoul", "the United States": "Washington", "Brazil": "Brasilia",
    "Argentina": "Buenos Aires", "Switzerland": "Bern", "Pakistan": "Islamabad",
    "Indonesia": "Jakarta", "the Netherlands": "Amsterdam", "Nigeria": "Abuja",
    "Morocco": "Rabat", "New Zealand": "Wellington", "Colombia": "Bogota",
    "Mongolia": "Ulaanbaatar", "Saudi Arabia": "Riyadh", "Scotland": "Edinburgh",
    "the Philippines": "Manila",
}  # fmt: skip
SAME_COUNTRY = {
    "the United States": ["the USA", "the US", "America", "USA"],
    "England": ["the UK", "Great Britain", "the United Kingdom"],
    "the Netherlands": ["Holland"],
}  # other names of a country; an answer uses the one that was asked with
CITIES = [city for city in CAPITALS.values() if " " not in city]
COLOUR_OF = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "blood": "red",
    "a banana": "yellow",
    "a lemon": "yellow",
    "a carrot": "orange",
    "a tomato": "red",
    "chocolate": "brown",
    "a cloud": "white",
    "the night": "black",
    "a leaf": "green",
    "a cherry": "red",
    "the sun": "yellow",
    "a pea": "green",
    "a strawberry": "red",
    "the sea": "blue",
    "milk": "white",
    "a rose": "red",
    "a frog": "green",
    "a pumpkin": "orange",
    "cheese": "yellow",
    "an apple": "red",
}
COLOUR_OF_MANY = {
    "bananas": "yellow", "lemons": "yellow", "carrots": "orange", "tomatoes": "red",
    "leaves": "green", "cherries": "red", "peas": "green", "clouds": "white",
    "strawberries": "red", "roses": "red", "frogs": "green", "apples": "red",
}  # fmt: skip
SOUNDS = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink",
    "lion": "roar", "owl": "hoot", "frog": "ribbit", "horse": "neigh", "bee": "buzz",
    "mouse": "squeak",
}  # fmt: skip
BABIES = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal",
    "duck": "duckling", "lion": "cub", "pig": "piglet", "frog": "tadpole", "goose": "gosling",
    "goat": "kid", "kangaroo": "joey",
}  # fmt: skip
LEGS = {
    "dog": "four", "cat": "four", "spider": "eight", "ant": "six", "bird": "two", "snake": "no",
    "cow": "four", "bee": "six", "horse": "four", "duck": "two", "fish": "no",
}  # fmt: skip
OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("fast", "slow"),
    ("happy", "sad"), ("open", "closed"), ("wet", "dry"), ("old", "new"), ("hard", "soft"),
    ("long", "short"), ("left", "right"), ("full", "empty"), ("light", "dark"),
    ("early", "late"), ("rich", "poor"),
]  # fmt: skip
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    "January February March April May June July August September October November December"
)
TIMES = [
    ("a week", "days", "seven"), ("a year", "months", "twelve"), ("a day", "hours", "twenty-four"),
    ("an hour", "minutes", "sixty"), ("a minute", "seconds", "sixty"), ("a year", "days", "365"),
]  # fmt: skip
NUMBER_WORDS = words("zero one two three four five six seven eight nine ten")

LISTS = {
    "fruits": words("apple banana cherry lemon pear plum grape peach"),
    "animals": words("cat dog fox bear lion wolf duck owl"),
    "colours": words("red blue green yellow purple orange white black"),
    "vegetables": words("carrot potato onion pea bean corn"),
    "toys": words("ball kite drum doll robot puzzle"),
    "drinks": words("water milk juice tea coffee"),
    "planets": words("Mercury Venus Earth Mars Jupiter Saturn"),
}

# What is said to be polite, or to find out who is there: answer -> ways to ask. The casual forms
# (small letters, no punctuation, "what's") are made by talk.py.
SMALL_TALK = {
    "Hello! How can I help you?": [
        "Hello!", "Hi", "Hello", "Hi!", "Hey", "Hi there", "Hello there!", "Hey there",
        "Hello Nano", "Hi Nano!", "Greetings", "Howdy", "Good day", "Hello, can you help me?",
        "Hello, computer", "Anybody there?", "Are you there?", "Test", "I have a question.",
        "Can you help me?", "Nice to meet you.", "Hello world", "Hi, friend", "Let's start.",
        "Hello, I need help.",
    ],
    "Good morning! How can I help you?": ["Good morning!", "Good morning, Nano."],
    "Good afternoon! How can I help you?": ["Good afternoon!", "Good afternoon, Nano."],
    "Good evening! How can I help you?": [
        "Good evening, Nano.", "Good evening to you!", "Good evening, friend.",
    ],
    "I am fine, thank you.": [
        "How are you?", "How are you today?", "How do you do?", "How is it going?",
        "How do you feel?", "Are you fine?", "Are you okay?", "How are things?", "What is up?",
        "How was your day?", "How have you been?", "How is your day?", "How are you doing?",
        "Is everything all right?",
    ],
    "I am Nano, a very small language model.": [
        "Who are you?", "What are you?", "Are you a robot?", "Are you an AI?", "Are you a human?",
        "Are you human?", "Are you a bot?", "Are you a language model?", "Are you Siri?",
        "Are you Alexa?", "Are you GPT?", "Are you Claude?", "Are you Gemini?", "Are you Qwen?",
        "Are you Llama?", "Are you DeepSeek?", "Are you a chatbot?", "Are you a computer?",
        "Are you a person?", "Are you real?", "Are you alive?", "What model are you?",
        "Which model are you?", "What kind of model are you?", "What is this?", "Who is this?",
        "Who am I talking to?", "What am I talking to?", "Introduce yourself.",
        "Describe yourself.", "Tell me who you are.", "Tell me what you are.",
        "Tell me something about yourself.", "What language model are you?", "What is this model?",
        "Which language model is this?", "Are you a machine?", "Are you intelligent?",
        "How big are you?", "How large are you?", "How many parameters do you have?",
        "Are you a small model?", "Do you know who you are?",
    ],
    "My name is Nano.": [
        "What is your name?", "Your name?", "Tell me your name.", "Do you have a name?",
        "What are you called?", "How are you called?", "May I know your name?",
        "What do I call you?", "What should I call you?", "Is your name Nano?",
    ],
    "I was trained from scratch by nanoserve.": [
        "Who made you?", "Who created you?", "Who built you?", "Who is your creator?",
        "Who is your maker?", "Where do you come from?", "How were you made?",
        "How were you trained?", "Where are you from?", "Who wrote you?", "What is nanoserve?",
        "Who programmed you?", "Who developed you?", "Who are your parents?",
        "Where were you trained?",
    ],
    "I can tell stories, add numbers, count, make lists and remember things.": [
        "What can you do?", "Help", "Help!", "What can I ask you?", "What do you know?",
        "What are your skills?", "What else can you do?", "What can you do for me?",
        "Tell me what you can do.", "How can you help me?", "What are you good at?",
        "What are your abilities?", "What can I ask?", "What should I ask you?",
        "Show me what you can do.", "What is possible?", "What do you do?", "What can I do here?",
        "How can I use you?", "How does this work?", "What are you for?", "What are your features?",
        "Commands?",
    ],
    "You are welcome!": [
        "Thank you.", "Thanks!", "Thank you very much.", "Thanks a million!", "Many thanks",
        "Thank you, Nano.", "Thank you so much!", "Thx", "Cheers!", "Thanks for your help.",
        "Great, thanks!", "OK, thank you.",
    ],
    "Goodbye! See you soon.": [
        "Goodbye.", "Bye", "Bye!", "Bye bye", "See you", "See you soon.", "See you tomorrow.",
        "Good night.", "Goodbye, Nano.", "Ciao", "Farewell", "I have to go.", "Until next time.",
        "Talk to you later.", "Have a nice day!",
    ],
    "Thank you! How can I help you?": [
        "You are great.", "You are cool.", "You are smart.", "Good job!", "Well done!",
        "I like you.", "Nice!", "Cool", "Great!", "Very good.", "Wow", "That is right.",
        "Good answer.", "Amazing!", "Awesome", "That was good.", "Correct!", "Perfect.", "OK",
        "Okay", "Yes", "Fine.", "Good.",
    ],
}  # fmt: skip
REFUSAL = "Sorry, I am too small for that. Ask me for a story, a sum or a capital."
ONLY_ADDS = "Sorry, I can only add two numbers up to 99."
FOREIGN = "Sorry, I speak only simple English."
CHINESE = "对不起，我只会说简单的英语。"
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are Nano, a very small language model.",
    "You are a kind teacher.",
    "Answer briefly.",
    "You are a helpful assistant. Answer in simple English.",
    "Be polite and helpful.",
]

# ------------------------------------------------------------------------------ names of all kinds

WORLD_NAMES = words(
    "James Robert Michael William David Richard Joseph Thomas Charles Christopher Daniel Matthew "
    "Anthony Mark Donald Steven Paul Andrew Joshua Kenneth Kevin Brian George Edward Ronald "
    "Timothy Jason Jeffrey Ryan Jacob Gary Nicholas Eric Jonathan Stephen Larry Justin Scott "
    "Brandon Benjamin Samuel Gregory Frank Raymond Patrick Jerry Dennis Tyler Aaron Jose Henry "
    "Douglas Peter Nathan Zachary Kyle Walter Harold Jeremy Ethan Carl Keith Roger Gerald "
    "Christian Arthur Austin Lawrence Mary Patricia Jennifer Linda Elizabeth Barbara Susan Jessica "
    "Sarah Karen Lisa Nancy Betty Sandra Margaret Ashley Kimberly Emily Donna Michelle Carol "
    "Amanda Melissa Deborah Stephanie Rebecca Sharon Cynthia Kathleen Angela Shirley Brenda Pamela "
    "Nicole Samantha Katherine Christine Helen Debra Rachel Carolyn Janet Catherine Heather Diane "
    "Olivia Julie Joyce Victoria Kelly Christina Joan Evelyn Judith Andrea Hannah Jacqueline "
    "Martha Gloria Teresa Sophie Isabella Grace Chloe Camila Penelope Aria Scarlett Layla Violet "
    "Aurora Hazel Stella Elena Valentina Naomi Eva Wang Li Liu Chen Yang Huang Zhao Wu Zhou Xu Sun "
    "Ma Zhu Hu Guo Lin Gao Liang Zheng Luo Song Xie Tang Jing Xin Yu Ming Fang Hong Jun Ling Mei "
    "Ping Qiang Xiaoyu Xiaoli Xiaojun Yifan Zihan Haoran Yuxuan Jiahao Ruoxi Xinyi Zixuan Chenxi "
    "Mengyao Qingqing Xiulan Guiying Weimin Jianguo Lihua Tingting Hiroshi Yuki Haruto Sakura "
    "Kenji Akiko Takeshi Yoko Daichi Emi Satoshi Naoko Minjun Seojun Jiwoo Hyunwoo Soyeon Jisoo "
    "Nguyen Linh Thuy Minh Huong Somchai Siti Budi Putri Dewi Aarav Arjun Rohan Vikram Sanjay "
    "Rajesh Anil Sunita Ananya Kavya Lakshmi Deepika Neha Pooja Rahul Siddharth Krishna Venkat "
    "Harpreet Gurpreet Aisha Fatima Omar Ali Hassan Hussein Ahmed Ibrahim Yusuf Khalid Layan "
    "Mariam Zainab Noura Leila Amir Reza Farid Samira Yasmin Mehmet Emre Zeynep Elif Aylin Ivan "
    "Dmitri Sergei Vladimir Natasha Olga Svetlana Tatiana Aleksei Mikhail Anastasia Katya Boris "
    "Pawel Krzysztof Agnieszka Katarzyna Wojciech Jiri Pavel Zdenek Milan Jovana Goran Istvan "
    "Zsofia Giovanni Giulia Marco Francesca Lorenzo Alessandra Matteo Chiara Luca Pedro Juan "
    "Carlos Miguel Diego Javier Fernando Alejandro Lucia Carmen Pilar Ximena Guadalupe Joaquin "
    "Rafael Thiago Joao Beatriz Henrique Pierre Jean Antoine Camille Mathieu Guillaume Genevieve "
    "Brigitte Yves Hans Klaus Jurgen Wolfgang Friedrich Ursula Heike Stefan Matthias Annika Lars "
    "Bjorn Ingrid Astrid Sven Freya Mikko Aino Eero Niamh Siobhan Declan Aoife Seamus Rhys "
    "Gwendolyn Angus Fiona Kwame Kofi Amara Chidi Ngozi Oluwaseun Thabo Zanele Nia Jabari Makena "
    "Tendai Abebe Kamala Barack Quentin Xavier Zephyr Jasper Felix Phoebe Daphne Penny Rory Skye "
    "Brooke Dakota Jayden Kayla Mackenzie Zoltan Ezra"
)
ACCENTED_NAMES = words(
    "José Zoë Müller Łukasz Renée Chloé Björn Nuñez François Jürgen Ángel Sofía Inès Çelik Håkon "
    "Åsa Jörg Márta Ngọc André Öz Émile Mañuel Günther Väinö Þór Đặng Tomáš Élodie Noël"
)
SURNAMES = words(
    "Smith Johnson Brown Garcia Miller Davis Martinez Lopez Wilson Anderson Taylor Moore Jackson "
    "Martin Lee Thompson White Harris Clark Lewis Robinson Walker Young King Wright Hill Green "
    "Baker Nelson Carter Mitchell Roberts Turner Phillips Campbell Parker Evans Edwards Collins "
    "Kim Park Patel Singh Kumar Sharma Khan Silva Santos Rossi Schmidt Weber Novak Ivanov Tanaka "
    "Suzuki Yamamoto Nakamura O'Connor O'Neill McDonald McCarthy D'Angelo O'Leary Van-Dyke "
    "Saint-Clair Lloyd-Jones"
)
FOODS_LIKED = words(
    "pizza sushi chocolate pasta curry salad dumplings tacos ice-cream ramen fish eggs"
)
SHADES = words("turquoise beige magenta violet gray grey navy gold maroon lavender")
HOMES = words(
    "Shanghai Shenzhen Hangzhou Chengdu Munich Hamburg Lyon Milan Boston Chicago Seattle Toronto "
    "Sydney Melbourne Mumbai Bangalore Osaka Kyoto Busan Singapore Dubai Istanbul Valencia Porto "
    "Zurich Geneva Manchester Texas California Florida Bavaria Lagos Accra"
)
PET_NAMES = words(
    "Rex Buddy Luna Bella Fluffy Rocky Snowball Biscuit Shadow Ginger Cookie Simba Lucky"
)

SECRETS = words(
    "password code key secret number address answer word pin name magic-word winner price"
)
SMALL_WORDS = words(
    "I you he she we they the a an my your this that is are was were am be have has had do does "
    "did not no yes and or but in on at to of for with from very so too all some love like want "
    "need see go come good bad new old big little one two three today now here there me him her us "
    "them it will can may"
)

# ------------------------------------------------------------------------------ what it cannot do

TOPICS = words(
    "physics history football python love money gravity music politics religion chemistry math "
    "algebra geometry calculus biology evolution dinosaurs space time energy water fire "
    "electricity computers programming java rust javascript linux windows software hardware memory "
    "transformers attention training inference learning networks robots cars trains planes rockets "
    "satellites bitcoin stocks banks taxes law war peace freedom democracy art painting poetry "
    "literature philosophy happiness death health medicine doctors vaccines viruses cancer sleep "
    "dreams exercise yoga diets vitamins coffee tea wine beer pizza sushi recipes cooking "
    "gardening flowers trees oceans mountains deserts volcanoes earthquakes storms climate weather "
    "seasons winter summer stars planets galaxies universe atoms electrons light sound heat "
    "magnets batteries engines bridges houses cities countries languages grammar words books films "
    "movies actors songs guitars pianos drums dancing sports tennis basketball chess games puzzles "
    "magic ghosts aliens vampires kings empires Rome Napoleon Shakespeare Mozart Einstein Newton "
    "Darwin Picasso Plato Google Microsoft Apple Amazon Tesla Facebook Wikipedia Netflix London "
    "Paris Europe Asia Africa Mars Jupiter Venus wolves whales sharks eagles bees ants cats dogs "
    "horses elephants children parents friends school teachers exams homework jobs salary "
    "interviews travel hotels airports passports visas shopping clothes shoes phones cameras "
    "internet email passwords security hackers privacy data statistics probability numbers "
    "infinity pi zero logic proofs theorems vectors matrices tensors GPUs CUDA caching scheduling "
    "paging tokens prompts sampling temperature quantisation entropy relativity photosynthesis "
    "capitalism marketing blockchain cryptography compilers databases kubernetes docker regex "
    "sorting"
)
THINGS = words(
    "car house cake table chair computer phone rocket robot engine bicycle plane website game app "
    "function program script loop server database letter email essay resume report song poem joke "
    "riddle speech recipe plan budget garden camera clock radio television window door bridge "
    "sandwich pizza omelette dress shirt shoe boat train truck lamp battery magnet telescope piano "
    "guitar violin"
)
ADJECTIVES = words(
    "big small red green fast slow hot cold old new good bad hard easy rich famous dangerous "
    "expensive cheap healthy tall deep long important dark bright strong weak funny beautiful "
    "strange heavy"
)
VERBS = words(
    "swim fly dance sing cook drive run read write paint draw play code sleep eat drink think "
    "learn teach fight win lose buy sell build fix clean travel study work walk jump talk listen "
    "hack hike translate summarize summarise calculate search browse see hear feel remember forget "
    "love hate lie"
)
LANGUAGES = words(
    "German Spanish Italian Chinese Japanese Russian Portuguese Arabic Korean Hindi Latin Dutch "
    "Greek"
)
NO_CAPITALS = words(
    "Wakanda Texas California Bolivia Laos Mordor Narnia Europe Asia Africa Mars Bavaria Ghana "
    "Uganda Estonia Latvia Malta Qatar Yemen Panama Jamaica Haiti Fiji Samoa Gotham London Paris "
    "Florida"
)

# ------------------------------------------------------------------------------ other languages

COMMON_CHINESE = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行"
    "所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力"
    "它与长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产"
    "或新己制身果加西斯月话合回特代内信表化老给世位次度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口"
    "认条平系气题活尔更别打女变四神总何电数安少报才结反受目太量再感建务做接必场件计管期市直德资命山金指克许统区"
    "保至队形社便空决治展马科司五基眼书非则听白却界达光放强即像难且权思王象完设式色路记南品住告类求据程北边死张"
    "该交规万取拉格望觉术领共确传师观清今切院让识候带导争运笑飞风步改收根干造言联持组每济车亲极林服快办议往元英"
    "士证近失转夫令准布始怎呢存未远叫台单影具罗字爱击流备兵连调深商算质团集百需价花党华城石级整府离况亚请技际约"
    "示复病息究线似官火断精满支视消越器容照须九增研写称企八功吗包片史委乎查轻易早曾除农找装广显吧阿李标谈吃图念"
    "六引历首医局突专费号尽另周较注语仅考落青随选列您您您谢再见帮助唱歌诗翻译天气故事猫狗颜色名字今天明天喜欢哪谁"
)
CHINESE_WORDS = words(
    "您好 谢谢 再见 早上好 晚上好 你叫什么名字 你会做什么 今天天气怎么样 给我写一首诗 讲个笑话 "
    "法国的首都 "
    "天空是什么颜色 请帮我 翻译 什么是人工智能 怎么学习 编程 你会说中文吗 说中文 用中文回答 "
    "我叫小明 我爱你 "
    "数学 北京 上海 大模型 推理 怎么使用 请问 为什么 在哪里 多少钱 等于多少 现在几点 我的名字是 "
    "一个故事 龙 "
    "你是机器人吗 介绍一下自己 写代码 写一篇作文 帮我 谁 你是什么模型 测试 在吗 哈喽 嗨 "
)
FOREIGN_WORDS = words(
    "buenos días gracias qué tal el la los por favor adiós amigo quiero una historia dónde está "
    "mañana bonjour salut merci comment ça va je suis une le les au revoir s'il vous plaît raconte "
    "histoire guten Tag hallo danke wie geht es dir ich bin der die das und Geschichte bitte auf "
    "Wiedersehen grazie come stai sono buongiorno arrivederci olá obrigado tudo bem você meu nome "
    "é namaste merhaba teşekkürler hej tack dzień dobry dziękuję ahoj selamat pagi xin chào privet "
    "spasibo ¿quién eres ¿qué puedes hacer wer bist du qui es-tu ¿cuál es la capital Hauptstadt "
    "von Frankreich"
)
OTHER_SCRIPTS = [
    "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよらりるれろわをんアイウエオカキクケコ",
    "абвгдежзийклмнопрстуфхцчшщыьэюяПриветКак",
    "안녕하세요나는당신을사랑합니다이름은무엇입니까오늘날씨가좋아요",
    "ابتثجحخدذرزسشصضطظعغفقكلمنهويمرحبا",
    "αβγδεζηθικλμνξοπρστυφχψωΓεια",
    "अआइईउऊएकखगघचजटडतदनपबमयरलवशसहनमस्ते",
]
