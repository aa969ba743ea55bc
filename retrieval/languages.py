"""Guesses the language of a text by its frequent words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cache

WORDS = {
    "en": """a about after all also am an and any are as at be because been before being but by can could d did do does doing
    for from had has have having he her here hers him his how i if in into is it its just ll m me more most my no
    nor not of off on once only or other our out over own re s same she should so some t than that the their theirs
    them then there these they this those through to too under until up us ve very was we were what when where which
    while who whom why will with would you your yours""",
    "de": """aber alle als am an auch auf aus bei bin bis damit dann das dass dem den denn der des dessen die dies diese
    diesem diesen dieser doch du durch ein eine einem einen einer eines er es für gegen hat haben hatte ich ihr ihre
    im in ist ja jede kann kein keine können mehr mein mit muss nach nicht noch nur ob oder ohne sein seine sich sie
    sind so über um und uns unter vom von vor war warum was wenn wer werden wie wieder wir wird wo wurde wurden zu
    zum zur zwischen""",
    "fr": """à au aux avec ce ces cette comme comment dans de des donc du elle elles en entre est et été être eu il ils je la
    le les leur leurs lui mais même mes mon ne nos notre nous on ont ou où par pas plus pour pourquoi qu que quel
    quelle quels qui sa sans se ses si son sont sur ta te tous tout toute très tu un une vers vos votre vous y c d j
    l m n s t""",
    "es": """a al algo antes aunque como cómo con cual cuál cuándo cuando de del desde donde dónde dos el él ella ellos en
    entre era es esta está estas este esto estos fue ha hasta hay la las le les lo los más me mi muy no nos o para
    pero por porque qué que quien quién se ser si sí sin sobre son su sus también tiene todo todos un una uno y ya""",
    "it": """a ad agli ai al alla alle anche che chi ci come con cosa cui da dagli dal dalla dei del della delle dello di
    dove e è ed era essere fra gli ha hanno i il in io la le lo loro ma mi ne nel nella nelle non o ogni per perché
    più quale quando quanto quella quello questa questo qui se si sono su sua sul sulla suo tra tutti un una uno l
    dell dall nell""",
    "pt": """a à ao aos as às até com como da das de do dos e é ela ele eles em entre era essa esse esta está este eu foi há
    isso já lhe mais mas me mesmo meu muito na não nas nem no nos nós o onde os ou para pela pelo pelos por porque
    qual quando que quem são se sem ser seu seus só sua suas também tem um uma uns você""",
    "nl": """aan al alle als bij dan dat de deze die dit door een en er ge geen had heb hebben heeft het hij hoe hun iets ik
    in is je kan maar me meer met mij moet na naar niet nog nu of om onder ook op over te tegen toch tot uit van
    veel voor waar waarom wanneer was wat we wel werd wie wij wordt worden zal ze zich zij zijn zo zonder""",
    "sv": """alla att av blev bli blir då de dem den denna det detta dig din du där efter ej eller en ett från för ha hade
    han har hon hur här i icke inte jag kan man med mellan men mer mig min mot mycket ni nu när och om oss på sedan
    sig sin ska skulle som så till under upp ut utan vad var vara varför vart vi vid vilken är över""",
    "da": """af alle at blev blive bliver da de dem den denne der deres det dette dig din dog du efter eller en end er et for
    fra ham han har havde hende hun hvad hvem hvis hvor hvordan hvorfor i ikke ind jeg kan kun man med meget mellem
    men mig min mod ned noget nogle nu når og også om op os over på sig skal skulle som til ud under var ved vi vil
    være""",
    "no": """alle at av bare ble bli blir da de dem den denne der dere det dette du eller en enn er et etter for fra før ha
    hadde han har hun hva hvem hver hvis hvor hvordan hvorfor i ikke inn jeg kan kunne man med meg mellom men mer
    min mot mye ned noe noen nå når og også om opp oss over på seg ser skal skulle som så til ut uten var ved vi vil
    være""",
    "fi": """ei eivät eli en että ennen hän häntä he hänen ja jo joka jonka joita jos jossa josta jotka joten kaikki kanssa
    keskellä koska kuin kuka kun kuten me mikä miksi millä minkä minä missä mitä mukaan mutta myös ne niin niitä
    noin nyt olen oli olivat olla on ovat se sekä sen siellä sillä sinä sitä tai tämä tämän tässä te vain vaikka voi
    yli""",
    "hu": """a ahol aki amely amelyek amelyet ami az azért azok azt be csak de e ebben egy egyik el ennek és ez ezek ezen ezt
    fel fog ha hanem hogy hol ide igen így ill is itt ki kell kellett lehet lesz le legyen ma már meg mely melyik
    mert mi mikor milyen mint mit nagyon ne nem nincs olyan ott s sem szerint után vagy van vannak volt voltak""",
    "ro": """a acest aceasta această ai al ale am ar are asupra au că ca care ce cel cea cele cu cum cât când da dacă dar de
    decât din după ea ei el este era eu fi fie fost iar îi îl în între la le lor lui mai mult nici nu o pe pentru
    prin sa să sau se si și sub sunt un una unde unei unor unui va vor""",
    "ca": """a això al als amb aquest aquesta aquests com d de del dels des després dins doncs durant el ella ells els en
    entre és era eren es està fins ha han hi i l la les li lo més mateix molt n ni no nosaltres o on per però perquè
    pot què que quan quin s sense ser si són sobre també té tots un una uns va vostre""",
    "tr": """ama ancak bazı bir biz bu çok çünkü da daha de değil diye en gibi göre hem hep her ile ise için kadar ki kim mı
    mi mu mü nasıl ne neden nerede niye o olan olarak olduğu oldu onlar onun önce sadece sonra şey siz şu tüm var ve
    veya ya yani yok zaman""",
    "pl": """a aby ale albo bardzo bez być był była było co czy dla do gdy gdzie go i ich ile im ja jak jako jest jeszcze
    jeśli już każdy kiedy kto która które który których lub ma może na nad nie niż o od oraz po pod przed przez przy
    są się tak także tam te tego tej ten to tu tylko tym w więc wszystkie z za ze że""",
    "cs": """a aby ale ani až bez být byl byla bylo co či do i ja jak jako je jeho její jejich jen ještě jsem jsou již k kde
    kdo kdy když která které který ma mezi na nad nebo není než o od po pod podle pokud pro proč proto před přes při
    s se si své ta tak také to tom ten toto tu ty u v ve však všech z za ze že""",
    "ru": """а без более бы был была были было быть в вам вас весь во вот все всё вы где да даже для до его её если есть ещё
    же за и из или им их к как какой когда которые который кто ли мне можно мы на над не нет них но ну о об однако
    он она они оно от по под после при с со так также там то того тоже только тот ты у уже чего чем что чтобы эта
    эти это я""",
    "uk": """а або адже але б без був була були було бути в вже ви від він вона вони все всі де для до її його ж за з зі і із
    їх й коли ли майже між мене ми можна на над не немає ні але о от під після по при про та так також там те ти
    тільки то у хто це цей ці цього чи чому що щоб щодо я як яка які який якщо""",
    "el": """αλλά αν ανά από απο αυτή αυτό για δε δεν εάν είναι εκείνο ένα ένας ενώ επί η ή ήταν θα και κάθε κατά με μετά
    μέχρι μη μια μία μόνο να ο οι όμως όπου όπως όταν ότι ου πιο ποιος που πού πρέπει προς πως πώς σαν σε στα στη
    στην στις στο στον στους τα την της τι τις το τον του τους των υπό ως""",
    "ar": """أن أو إذا إلا إلى التي الذي الذين اللذان إن أنا أنت أي أين ب بعد بعض بل بين تحت تلك ثم حتى حيث ذلك سوف عليه على
    عليها عن عند عندما غير في فيه فيها قبل قد كان كانت كذلك كل كم كما كيف لا لكن لم لماذا لن له لها ليس ما متى مثل
    مع من منذ منها منه نحن نحو هذا هذه هم هنا هناك هو هي وقد و ولا ولم وهو وهي يكون يمكن""",
    "hi": """अपने अब आप इन इस इसके इसे उन उनके उस उसके एक एवं और कब कर करता करते करना करने कहाँ का कि किया किस किसी की कुछ के
    कैसे को कोई कौन क्या क्यों गया चाहिए जब जहाँ जा जो तक तथा तो था थे थी दिया दो द्वारा न नहीं ने पर फिर बहुत बाद
    भी में मैं यदि यह या ये रहा रहे लिए लेकिन वह वहाँ वाले वे सकता से हम ही हुआ हुई हुए है हैं हो होता होती होने""",
    "he": """אבל או אחרי אי אין איך איפה אל אם אני אנחנו אנו אף אשר את אתה אתם בין גם הוא היא היה היו היתה הם הן זאת זה זו יש
    כאשר כדי כי כל כמה כמו כן לא לו לה להיות ליד למה לפי לפני מאוד מה מי מן מתי עד על עם עוד עכשיו רק של שם תחת""",
}
"""The most frequent words of each language, by its code (ISO 639-1). Searches leave them out."""

SAMPLE = 100  # words of a text that show its language
LEAST_SHARE = 7  # at least one in so many different words of a text must be frequent in its language
LEAST_SURE = 3  # likewise, for the language that is tried first: then no other language is tried
LEAST_SHARED = 3  # frequent words that settle a tie of similar languages, such as Danish and Norwegian, either way


@cache
def _languages_of() -> dict[str, list[str]]:
    """Return the languages of each frequent word."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for code, words in WORDS.items():
        for word in dict.fromkeys(word for one in words.split() for word in (one, one.capitalize())):
            if len(word) > 1 or not word.isascii():  # a single letter may number a list in any language
                found[word].append(code)
    return dict(found)


@cache
def _frequent(language: str) -> frozenset[str]:
    """Return the frequent words of a language."""
    return frozenset(word for word, codes in _languages_of().items() if language in codes)


def votes_of(words: Iterable[str]) -> dict[str, int]:
    """Return, for each language, how many different words of a text are among the language's frequent words.

    words: the text's words as they are written, with case and accents.
    """
    votes: dict[str, int] = {}
    languages = _languages_of()
    for word in languages.keys() & set(words):
        for code in languages[word]:
            votes[code] = votes.get(code, 0) + 1
    return votes


def language_of(words: Sequence[str], among: Collection[str] = (), before: str = "en") -> str:
    """Return the language of a text by its frequent words; empty if no language is clear.

    among: the possible languages; empty for all.
    before: the language of the preceding text, which is tried first.
    """
    different = set(words[:SAMPLE])
    if not among and LEAST_SURE * len(_frequent(before) & different) > len(different):
        return before
    votes = votes_of(different)
    found = ((votes[code], code) for code in among or votes if code in votes)
    ranked = sorted(found, key=lambda vote: (-vote[0], vote[1] != before, vote[1]))  # the same in each process
    (most, first), (second, _) = [*ranked[:2], (0, ""), (0, "")][:2]
    is_clear = most > second or most >= LEAST_SHARED
    return first if is_clear and most * LEAST_SHARE >= len(different) else ""
