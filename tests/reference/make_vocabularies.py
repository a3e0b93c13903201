#!/usr/bin/env python3
"""Writes vocabularies.json: vocabularies trained on the demo book, texts, how they are cut, and the ids that they have.

    make_vocabularies.py       rewrites it (Debian: python3-regex, python3-sentencepiece; half a minute)

Byte-level BPE is computed here, slowly and from its definition: the published regular expressions cut the text, then the
pair of lowest rank merges wherever it stands, until none is left. One vocabulary serves every pre-tokenizer. It is trained
on text that nothing cuts, so its merges reach across places at which one of them cuts, and ids depend on where it does.
The expressions are as published with the models.
SentencePiece vocabularies are trained and applied by that library.
"""
import codecs, collections, io, json, os
import regex
import sentencepiece

HERE = os.path.dirname(os.path.abspath(__file__))
BOOK = open(os.path.join(HERE, "../../models/demo-book.txt"), encoding="utf-8").read()
MERGES, LONGEST, SPM_SIZE = 700, 10, 1000  # the longest token in bytes

TEXTS = [
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\t\n", "\r\n", " \n ", "x", " x", "x ", "  x  ", "\n x", "x\n",
    "The old lighthouse stood at the edge of the harbour, and nobody had climbed it for years.",
    "\"Where is the ferry?\" asked Harriet.  \"It's late.\"\n\nNobody answered; they'd all gone home.\n",
    "I'm, you're, he's, we'll, they've, she'd, don't: I'M, YOU'RE, HE'S, WE'LL, THEY'VE, SHE'D, DON'T; 'Tis 'twas' 'm's",
    " 's 't're'll've 'Re'lL'Ve ''s '' 'sS", "it'Sx we'LLx don'Tdo can'tdo I'Mx you'REx they'Vex he'Dx it'sx",
    "one\rtwo\r\rthree!\r.\r x \r\n\ry", "（中），。！？ a，b：c ‘’！",
    "1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 -42 +7 0x1F 10% 1st 2nd 17:45 2026-11-22 a1b22c333d4444",
    "x=1;y=22;z=333 (4444) [55555] {666666}",
    "    four spaces\n\tone tab\n\t\ttwo tabs\n        eight spaces\n  trailing   \n",
    "a  b   c    d     e\t\tf \t g\n\nh\n \n \ni\r\n\r\nj \n  \n   k  ",
    "end with spaces   ", "end with a line\n", "end with lines\n\n\n", "end with both \n \n  ",
    "!!! ??? ... ,,, --- *** ### $$$ ^^^ ~~~ ||| <<>> ==>> +++ `` '' \"\" (()) [[]] {{}} \\\\ // && @@ %% __",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; } // don't stop\n\treturn sum;\n",
    "https://example.org/a_b-c?d=e&f=%20g#h user@example.org C:\\temp\\file.txt",
    "$5 + 3 = 8 < 9 > 7 ^ 2 ~ 1 | 0 `code` €10 £5 ±5 ×3 50°",
    "café naïve Äpfel Öl Über straße Ångström Łódź čeština İstanbul ışık",
    "e\u0301 n\u0303 o\u0308 combining marks, a\u0323\u0306b",
    "Быстрая лодка плывёт в 3 часа, не позже.",
    "Η θάλασσα είναι ήρεμη σήμερα· 12 βάρκες.",
    "\u05d4\u05e1\u05e4\u05d9\u05e0\u05d4 \u05d9\u05d5\u05e6\u05d0\u05ea \u05d1\u05e9\u05e2\u05d4 7.",
    "\u0627\u0644\u0633\u0641\u064a\u0646\u0629 \u062a\u063a\u0627\u062f\u0631 \u0641\u064a \u0627\u0644\u0633\u0627\u0639\u0629 \u0663\u0664\u0665\u0666، \u063a\u062f\u064b\u0627\u061f",
    "नाव सुबह १२३४ बजे जाती है।", "เรือออกเวลา ๑๒ นาฬิกา",
    "船在早上7点出发，开往北方。你来吗？“来！”", "船は朝に出る。フェリーは12時です。", "배는 아침 7시에 떠납니다. 정말요?",
    "mixed: abc中文def абв123где 中1文2 中 1 文 2", "აბ საქართველო աբ ᎠᎡ ẞἀ АБ",
    "①② ½¾ Ⅳ x²y³ ¹₀ １２３４ 𝟘𝟙",
    "🚢 ⚓\ufe0f🌊🌊 👍🏽 👩\u200d🚀 🇳🇴 ❤\ufe0f\u200d🔥 ✅!\n🚢🚢\n",
    "no-break\u00a0space a\u00a0\u00a0b \u00a0c \u200bzero width\u200b", "‘quoted’ “double” — dash–range … «gu» ¿qué? ¡sí!",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "                                 x", "thethethe the the  the\nthe\n\nthe", "0000000000000000", "\n\n\n\n\n\n\n\n\n\n!",
]
# Only cut: what tells the expressions apart that the texts above do not.
CUT_TEXTS = [
    "camelCase PascalCase HTTPServer XMLHttpRequest iPhone13Pro éCOLE ÉcoLe ǅungla AéB DON'Tx We'llY O'NEILL",
    "1 12 123 1234 12345 123456 1234567 a1234567890b \u0661\u0662\u0663\u0664\u0665 १२३४ 1234.5678 ½¼ⅣⅣ",
    "今天Tokyo天気。カタカナ・ひらがな、漢字ＡＢ１２ ｶﾀｶﾅ 〇一 \uf900\u3400 \U00020000x \u2f00\u9fa6\u9fff",
    "안녕하세요 세계abc ㄱㄴ \u1100\u1161 ㄅㄆx กำเก ກເແ កានx \u1000\u102c \uaa60 \ua9e0a",
    "e\u0301a\u0323x \u0301 \u0301a !\u0301 a\u0301\u0301 b 1\u0301 नमस्ते", "a b c d e\u0301 f  g h1 i j. k l\nm n o é é 1 p q ",
    "a/b//c\n/d !/\n\r/ x ./\n\n/\n !\r\n\r\n z ?! \r\n", " " * 1023 + "x", " " * 600, "a" + " " * 70 + "\n" + " " * 9 + "b   c     d",
    "~~ ~a ~~~b $~ +~+ €~ ~1", "!abc #def .ghi 'jk -lm ?no ~pq —rs +tu ·vw _x", "\ta\tbc \t d",
    "IMGIMGABCZ IMGIMGABCDEZ <sentinel:12> <sentinel:> IMGIMGZ \tx\n    y  z     w",
    "a(b)c|d.e,f!g?h…i。j，k、l।m\u06d4n\u060co p (q |r ;s", "“a”…—：；，！！ \u303f\ufe30\ufe4f‘b’ ！c",
    "\u3000x\u3000\u3000y a\u2028b \u00a0c\u00a0 d\u2003\u2003!", "one\n \ntwo\n\n  three \n  \nfour  \r\n five\r\r six\n\t\n", "`a` `` ^b^ |c| {d} <e> =f= `$`",
    "a  1   2\t\t3 \n 4   five",
    # Marks and letters with and without case, in many scripts.
    "हिन्दी में लिखी हुई छोटी कहानियाँ, नदी के किनारे।", "เรือลำเล็กที่ท่าน้ำ ผู้คนรู้จักกันดี",
    "الْقَارِبُ الصَّغِيرُ عِنْدَ الْمِينَاءِ، وَلَا أَحَدَ", "הַסִּירָה הַקְּטַנָּה בַּנָּמָל",
    "Το Μικρό ΚΑΡΑΒΙ φεύγει ΤώραΠρωί ἀρχῇ Ὅμηρος", "Маленькая ЛОДКА уходитСейчас ЁлкаЁЖ нЕТ",
    "İstanbul'da IŞIK ve ılık ÇAYlar, güzelÇiçek'in, Ali'nin", "Vie\u0302\u0323t Nam ra\u0302\u0301t đẹp, TIÊ\u0301NG",
    "თბილისი ᲗᲑᲘᲚᲘᲡᲘ ქალაქიᲐბა", "ǅungla ǈubav NǅAaǅa ǅǅ", "한국어 문장과 \u1112\u1161\u11ab\u1100\u1173\u11af 자모",
    "তরী ছোট। தமிழ் மொழி တံငါသည် ទូកតូច བོད་ཡིག", "ÉCOLE École éCOLE ÀBÇdéF naïveÉté HÉLLO'S CAFÉ'll it'ſ DON'ſ",
    "e\u0301 E\u0301COLE e\u0301Cole \u0301x !\u0301 ʰaʰAʰ ªº ʻOkina", "👩\u200d🚀\ufe0fab ❤\ufe0fA 1\ufe0f\u20e3x", "Ა̀ა Ԛԛ ꙮ ℵ ⅷ Ⅷ ⓐⒶ",
    "時々〇月〻の佐々木さん ⼀⺀ abc々A", "\u3000漢\u3000字\u2028\u3000！\u3000\u3001 x\u3000", "~é +~+ ~~~ a~b €~\n ~日",
]
# Not UTF-8: bytes that begin nothing, overlong forms, a surrogate, sequences that break off before a letter, a digit, the end.
BROKEN = [b"\xff", b"a\xff\xfe b", b"\x80\x80\x80x", b"the\xc3 the\xe2\x82 12", b"\xe2\x96harbour", b"\xf0\x9f\x9aferry \xf0\x9f",
          b"\xc0\x80\xc1\xbf12\xf5\x80\n", b"\xed\xa0\x80\xed\xb0\x80 x", b"  \x80  \xbf\n\n\xc3", b"caf\xc3\xa9 caf\xe9 caf\xc3"]
# Tokens that no merge makes, as published vocabularies have some: what takes a piece whole finds them.
UNREACHED = [" lighthouse", " harbour", " ferry", " answered", " climbed", " spaces", " lines", " dash", "123", "Where", "Harriet",
             "return", "example", "café", " 船", "…"]

# ---- the expressions, as published with the models ----

def deepseek_letters():
    ranges = """41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5
        3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D
        1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC
        1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E
        2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06
        FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"""
    return "".join("-".join(chr(int(end, 16)) for end in r.split("-")) for r in ranges.split())


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
PORO = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
DEEPSEEK_WORDS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
DEEPSEEK_V3 = DEEPSEEK_WORDS + r"[\r\n]*|" + SPACES
CJK_AND_KANA_ONLY = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def llama3(digits, signs=r"[^\s\p{L}\p{N}]+[\r\n]*", tail=SPACES):
    return CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits + "| ?" + signs + "|" + tail


def cased(digits, contraction, but="", signs=r" ?[^\s\p{L}\p{N}]+[\r\n/]*"):
    """Both kinds of word, as o200k_base has them: capitals, then small letters; letters without case and marks are both."""
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (f"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}|" + r"\p{N}" + digits + "|" + signs + "|" + SPACES)


O200K = cased("{1,3}", CONTRACTION + "?")


# Names in tokenizer.ggml.pre, expressions that apply one after the other, whether a piece that is a token is taken whole; the
# first ones get ids, the others only pieces.
SCHEMES = [
    (["default"], [r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"], False),
    (["gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code", "roberta-bpe", "gigachat", "a.x-4.0",
      "mellum", "modern-bert", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"], [GPT2], False),
    (["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"], [llama3("{1,3}")], True),
    (["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], [llama3("{1,3}")], False),
    (["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "hunyuan", "solar-open", "grok-2", "stablelm2", "megrez"], [llama3("")], False),
    (["starcoder", "smollm", "refact", "codeshell", "exaone", "minerva-7b", "mellum2", "command-r"], [r"\p{N}", GPT2], False),
    (["deepseek-llm"], [r"[\r\n]", rf"\s?[{deepseek_letters()}]+", r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                        r"\s+$", CJK_AND_KANA_ONLY, r"\p{N}+"], False),
]
WITH_IDS = len(SCHEMES)
SAME = [("qwen2", "bailingmoe")]  # written in other words
SCHEMES += [
    (["qwen35"], [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES], False),
    (["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], [O200K], False),
    (["granite-embed-multi-97m"], [O200K], True),
    (["tekken"], [cased("", "")], True),
    (["gemma4", "granite-embed-multi-311m", "sarvam-moe"], [r"[^\n]+|[\n]+"], False),
    (["whitespace"], [r"\S+"], False),
    (["falcon"], [r"[\p{P}$+<=>^~|`]+", GPT2, r"[0-9][0-9][0-9]"], False),
    (["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], [r"\p{N}{1,3}", CJK, DEEPSEEK_V3], False),
    (["spark2_5"], [r"\p{N}{1,3}", CJK, DEEPSEEK_WORDS + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"], False),
    (["deepseek-coder"], [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_AND_KANA_ONLY, r"\p{N}"], False),
    (["minicpm5"], [r"\p{N}{1,3}", llama3("+")], True),
    (["bailingmoe", "bailingmoe2", "llada-moe"], [r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                                                  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"], False),
    (["seed-coder"], [llama3("", signs=r"[^\s\p{L}\p{N}\r\n]+")], False),
    (["exaone-moe"], [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
                      r"|\s*[\r\n]|\s+(?!\S)|\s+"], False),
    (["laguna"], [r"[^\n]+|[\n]+", llama3("")], False),
    (["jais-2"], [llama3("{1,3}", tail=r"\s*[\r\n]+|" + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4)) +
                         r"\s{1,2}(?!\S)|\s{1}")], False),
    (["youtu"], [r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
                 r"|[\u3105-\u312f]+|" + CJK, cased("", CONTRACTION + "?")], True),
    (["tiny_aya", "cohere2moe"], [THREES, O200K], False),
    (["afmoe"], [THREES, r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
                 r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+", DEEPSEEK_V3], False),
    (["superbpe"], [r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))"], False),
    (["poro-chat", "bloom", "gpt3-finnish"], [PORO], False),
    (["viking"], [PORO, r"\p{N}"], False),
    (["chameleon"], [r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
                     r"[\p{P}!-/:-@\[-`{-~]", GPT2], False),
    (["kimi-k2"], [r"[\p{Han}]+|" + cased("{1,3}", CONTRACTION + "?", r"&&[^\p{Han}]", r" ?[^\s\p{L}\p{N}]+[\r\n]*")], False),
    (["ufakzeka"], [llama3("").removeprefix(CONTRACTION + "|")], False),
]

# ---- byte-level BPE ----

def spelling():
    """The printable character that stands for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


SPELLING = spelling()
def spelled(raw): return "".join(SPELLING[b] for b in raw)


def merged(symbols, pair):
    """Joins the pair wherever it stands, from the left."""
    out, at = [], 0
    while at < len(symbols):
        both = tuple(symbols[at:at + 2]) == pair
        out.append("".join(pair) if both else symbols[at])
        at += 2 if both else 1
    return out


def train_bpe():
    """Tokens and merges. A little of the book, and the texts until what they repeat is worth a merge."""
    symbols, merges = list(spelled((BOOK[:40000] + "".join(TEXTS) * 12).encode())), []
    while len(merges) < MERGES:
        counts = collections.Counter(p for p in zip(symbols, symbols[1:]) if len(p[0] + p[1]) <= LONGEST)
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        symbols = merged(symbols, best)
    tokens = list(dict.fromkeys(SPELLING + ["".join(m) for m in merges] + [spelled(t.encode()) for t in UNREACHED]))
    return tokens, merges


BROKEN_PART = "\U0010ffff"  # a character of no class


def characters(raw):
    """[(character, its bytes)]. Of invalid UTF-8, the longest beginning of a character counts as one."""
    parts = []
    def handler(error):
        parts.append(raw[error.start:error.end])
        return BROKEN_PART, error.end
    codecs.register_error("broken_part", handler)
    text = raw.decode("utf-8", "broken_part")
    broken = iter(parts)
    return [(c, next(broken) if c == BROKEN_PART else c.encode()) for c in text]


def cut(chars, expressions):
    """Each expression cuts what the ones before left; what it does not match stays together."""
    pieces = [chars]
    for expression in expressions:
        smaller = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(expression, "".join(c for c, _ in piece), regex.V1):
                smaller += [piece[at:match.start()], piece[match.start():match.end()]]
                at = match.end()
            smaller.append(piece[at:])
        pieces = [p for p in smaller if p]
    return [b"".join(raw for _, raw in piece) for piece in pieces]


def bpe_ids(raw, expressions, whole, index, ranks):
    ids = []
    for piece in cut(characters(raw), expressions):
        symbols = list(spelled(piece))
        if whole and "".join(symbols) in index: symbols = ["".join(symbols)]
        while pairs := [p for p in zip(symbols, symbols[1:]) if p in ranks]:
            symbols = merged(symbols, min(pairs, key=ranks.get))
        ids += [index[s] for s in symbols]
    return ids


def bpe():
    tokens, merges = train_bpe()
    index, ranks = {t: i for i, t in enumerate(tokens)}, {m: i for i, m in enumerate(merges)}
    raw = [t.encode() for t in TEXTS] + BROKEN
    schemes, seen = [], {}
    for i, (names, expressions, whole) in enumerate(SCHEMES):
        pieces = [[len(p) for p in cut(characters(r), expressions)] for r in raw + [t.encode() for t in CUT_TEXTS]]
        schemes.append({"names": names, "pieces": pieces})
        if i < WITH_IDS: schemes[-1]["ids"] = [bpe_ids(r, expressions, whole, index, ranks) for r in raw]
        other = seen.setdefault((str(pieces), whole), names[0])
        assert other == names[0] or (other, names[0]) in SAME, f"these texts do not tell {names[0]} and {other} apart"
    return {"tokens": tokens, "merges": [" ".join(m) for m in merges], "schemes": schemes}


# ---- SentencePiece ----

def sentencepiece_vocabulary(name, **how):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(BOOK[:60000].splitlines() + TEXTS * 3), model_writer=model, model_type="bpe", vocab_size=SPM_SIZE,
        byte_fallback=True, character_coverage=0.995, normalization_rule_name="identity", remove_extra_whitespaces=False,
        num_threads=1, minloglevel=2, **how)
    p = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    kind = lambda i: 2 if p.is_unknown(i) else 3 if p.is_control(i) else 6 if p.is_byte(i) else 1  # as numbered in GGUF
    every = range(p.get_piece_size())
    return {"name": name, "add_space_prefix": how["add_dummy_prefix"], "tokens": [p.id_to_piece(i) for i in every],
            "scores": [p.get_score(i) for i in every], "types": [kind(i) for i in every], "ids": p.encode(TEXTS)}


def main():
    out = {"texts": TEXTS, "cut_texts": CUT_TEXTS, "broken": [list(b) for b in BROKEN], "bpe": bpe(), "sentencepiece": [
        sentencepiece_vocabulary("words", add_dummy_prefix=True),
        sentencepiece_vocabulary("across-words", add_dummy_prefix=False, split_by_whitespace=False)]}
    path = os.path.join(HERE, "vocabularies.json")
    json.dump(out, open(path, "w", encoding="utf-8"), ensure_ascii=False, separators=(",", ":"))
    print(f"{os.path.getsize(path)} bytes, {len(out['bpe']['tokens'])} tokens")


if __name__ == "__main__":
    main()
