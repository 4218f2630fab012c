"""Texts and characters on which an engine has to agree with the library before it is used.

The texts vary what tokenizers distinguish: letters of every case and script, marks, digits, kinds
of space, punctuation, line ends, and their neighbourhoods.

Characters are compared because each library brings the tables of its own Unicode release:
gigatoken 0.10 those of 17, tokenizers 0.22 those of 16 for its patterns and of 9 for its
normaliser. Each character that this Python knows is compared; one that it does not know is taken
for different until proven equal.

Shape letters: S code points below 0x110000.
"""

from __future__ import annotations

import string
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

_SENTENCES = (
    "The quick brown fox can't jump over 12 lazy dogs; it's 3.14% slower, isn't it?",
    "Zażółć gęślą jaźń. Příliš žluťoučký kůň úpěl ďábelské ódy, 1 234,56 Kč.",
    "Größe, Straße und Übermut; l'été à Orléans où naïve cœur; ¿Qué será, señor Ñandú?",
    "Þetta reddast. Tiếng Việt có sáu thanh điệu. İstanbul'da ığdır ağacı.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία, ώ Ἀθῆναι!",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Її ґанок, ўдзень.",
    "نص حكيم له سر قاطع وذو شأن عظيم ١٢٣٤٥، مكتوبٌ على ثَوْبٍ أخضر؟ پیچیده‌ام",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה, שָׁלוֹם עֲלֵיכֶם!",
    "ऋषियों को सताने वाले दुष्ट राक्षसों का राजा १२३४। क्षत्रिय, हिन्दी में लिखा।",
    "আমার সোনার বাংলা, আমি তোমায় ভালোবাসি। ১২৩৪ টাকা।",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์ ๑๒๓",
    "யாமறிந்த மொழிகளிலே தமிழ்மொழி போல் இனிதாவது எங்கும் காணோம் ௧௨௩",
    "తెలుగు కన్నడ ಕನ್ನಡ മലയാളം ਪੰਜਾਬੀ ગુજરાતી සිංහල ລາວ မြန်မာ ខ្មែរ አማርኛ Հայերեն ქართული ᏣᎳᎩ བོད",
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列張。我們有２０２４個「問題」——是吗？",
    "吾輩は猫である。名前はまだ無い。カタカナとひらがな、ｶﾀｶﾅ、漢字々。スーパー１２３",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. ㅋㅋㅋ 한글",
    "🙂 👩‍👩‍👧‍👦 🤷🏽‍♀️ 🇩🇪🇫🇷 👍🏿 ❤️ 1️⃣ ☃ ♞ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 𝕬𝖇𝖈 𝒳 𐍈 𠮷",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β ≈ ½·¾ ² ³ ₁ Ⅷ ⅔ ① €100 £5 ¥3 §7 №5 ™ ® © ° µ ª º",
    "ﬁ ﬂ ﬀ Å Å Ω K K ſ ẞ ß Ǆ ǅ ǆ İ ı ﷺ ﷽ … ‥ ㎏ ㍿ Ａｂｃ！ ｈａｌｆ ⁿ ᵃ",
)
_CODE = '''\
def f(x: int = 0, *args, **kwargs) -> "list[str]":\r
\t"""Doc."""\n\t\tif x!=0 and not x<=1_000: return [f"{i:>08.3f}%" for i in range(x//2)]
    # TODO(me): https://example.org/a/b?c=d&e=f#g  <b>bold</b>&nbsp;<br/>
    print('a\\n', x["k"]);;  a->b::c<d>(e)&&!f||~g ^ h?:i @j $k %l `m` {{n}} [[o]] </o></p>
/* c */ #include <stdio.h>\nint main(void){return(0);} //////// ======== -------- ******** ........
SELECT * FROM t WHERE a_b = 'c' AND camelCaseXMLHttpRequest2JSON IS NOT NULL;\n\n\n\n| a | b |\n|--|
'''
_SPACES = (
    *(" ", "  ", "   ", "    ", " " * 7, " " * 16, " " * 65, " " * 300, "\t", "\t\t", "\t" * 9),
    *("\n", "\n\n", "\n\n\n", "\n" * 11, "\r", "\r\n", "\r\n\r\n", "\n\r", " \n", "\n ", "\n  \n"),
    *(" \t \n\t ", "\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\u00a0", "\u00a0\u00a0 ", " \u00a0"),
    *("\u1680", "\u2003", "\u2009\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"),
    *("\u3000\u3000a", "\u180e", "\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad"),
)
_INSIDE = ("", "a", "Ab", "é", "中", "7", "77", ".", "!!", "'s", "'S", "'ll", "'re", "\u0301", "▁")
_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'x", "’s", "'ſ", "''s", "'sa", "'1")
_PIECES = (
    "<0x0A>",
    "<0x41>",
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "[UNK]",
    "<|endoftext|>",
    "▁▁",
    "a▁b",
)


@cache
def probe_texts() -> tuple[str, ...]:
    """The texts, the empty one among them."""
    sentences = [*_SENTENCES, _CODE]
    decomposed = [unicodedata.normalize("NFD", text) for text in sentences]
    return (
        "",
        *sentences,
        *decomposed,
        *(text.upper() for text in sentences),
        *(f" {text} \n" for text in sentences),
        "\n".join(sentences),
        *_around_spaces(),
        *_character_runs(),
        *_words(),
        *_controls(),
    )


def _around_spaces() -> list[str]:
    """Every kind of space between each pair of neighbours, one text for each pair."""
    texts = list(_SPACES)
    for left, right in product(_INSIDE, repeat=2):
        texts.append("x".join(f"{left}{space}{right}" for space in _SPACES if len(space) < 20))
    return texts


def _character_runs() -> list[str]:
    """Digits, punctuation, letters and marks, each many times in a row."""
    digits = "31415926535897932384626433832795"
    texts = [f"{digits[:n]} a{digits[:n]}b-{digits[:n]}.{digits[:n]}" for n in range(1, 33)]
    texts += [mark * n for mark in string.punctuation for n in (1, 2, 3, 4, 5, 9, 16, 33)]
    texts += [f"{a}{b} {a}{b}{a}\n{b}{a}x" for a, b in product(string.punctuation, repeat=2)]
    texts += [letter * n for letter in "aZé中한ा0 " for n in (17, 70, 1500)]
    texts += ["e" + "\u0301" * n + "\u0323" for n in range(1, 9)]
    return texts


def _words() -> list[str]:
    """Words of every length and case, contractions, and names that vocabularies give to tokens."""
    base = "Pneumonoultramicroscopicsilicovolcanoconiosis" * 3
    texts = [f"{base[:n]} {base[:n].upper()} {base[:n].lower()}X" for n in range(1, len(base), 3)]
    for word in ("I", "they", "THEY", "ñ", "Д", "中", "9", "_", ""):
        texts.append(" ".join(f"{word}{end} {word}{end.upper()}x" for end in _CONTRACTIONS))
    texts += [
        f"{left}{piece}{right}" for piece in _PIECES for left in ("", "a", " ") for right in _INSIDE
    ]
    return texts


def _controls() -> list[str]:
    """Control characters, and code points at the ends of each length in UTF-8."""
    points = [*range(0x21), *range(0x7F, 0xA1), 0x7FF, 0x800, 0xFFF, 0xD7FF, 0xE000, 0xFFFD]
    points += [0xFFFC, 0x10000, 0x10FFFD]
    return [f"a{chr(point)}b {chr(point)}{chr(point)}\n{chr(point)}1" for point in points]


_CODE_POINTS = 0x110000
_ASSIGNED = (range(0x40000), range(0xE0000, 0xE1000))
"""Ranges in which Unicode has assigned characters, or may soon, without the private planes."""
_PRIVATE_PLANES = range(0xF0000, _CODE_POINTS)
_SURROGATES = range(0xD800, 0xE000)
_EMOJI = range(0x1F000, 0x1FB00)
"""Blocks whose new characters are common soon: each is compared, assigned or not."""
_UNIFORM_RUN, _EVERY = 256, 64
"""Runs of 256 or more neighbours of one category, mostly ideographs, are sampled at every 64th."""


def unknown_characters() -> NDArray[np.bool_]:
    """Mask of the code points that this Python's Unicode lacks [S], a new array."""
    is_unknown: NDArray[np.bool_] = _categories() == 0
    return is_unknown


@cache
def compared_characters() -> str:
    """The characters on which two libraries are compared one by one, ascending."""
    categories = _categories()
    chosen = [point for point in _EMOJI if categories[point] == 0]
    for run in _code_point_runs():
        step = _EVERY if len(run) >= _UNIFORM_RUN else 1
        chosen += [*run[::step], run[-1]]
    return "".join(map(chr, sorted(set(chosen))))


def represented_by(character: str) -> range:
    """A compared character and its neighbours that it represents, which are not compared."""
    compared = compared_characters()
    at = bisect_left(compared, character)
    before = ord(compared[at - 1]) + 1 if at else 0
    after = ord(compared[at + 1]) if at + 1 < len(compared) else ord(character) + 1
    return range(before, after)


def is_young(character: str) -> bool:
    """Whether Unicode 3.2 lacks a character, so that a normaliser may not know it."""
    return unicodedata.ucd_3_2_0.category(character) == "Cn"


def _code_point_runs() -> Iterator[range]:
    """Maximal runs of known characters of one category, in ascending order."""
    categories = _categories()
    starts = np.flatnonzero(np.diff(categories, prepend=-1) != 0).tolist()
    for start, stop in zip(starts, [*starts[1:], _CODE_POINTS], strict=True):
        if categories[start] != 0 and start not in _SURROGATES:
            yield range(start, stop)


@cache
def _categories() -> NDArray[np.int16]:
    """A number for the category of each code point [S]; 0 where none is assigned."""
    numbers = {"Cn": 0, "Co": 1}
    table = np.zeros(_CODE_POINTS, np.int16)
    table[_PRIVATE_PLANES.start :] = numbers["Co"]
    for block in _ASSIGNED:
        names = map(unicodedata.category, map(chr, block))
        table[block.start : block.stop] = [numbers.setdefault(n, len(numbers)) for n in names]
    return table
