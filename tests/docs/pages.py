"""The pages that a reader sees, taken apart: code blocks and sentences."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*).*?\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page and the line it begins at."""

    language: str
    code: str
    line: int


def pages() -> list[Path]:
    """All pages of the site that are written by hand, README and CONTRIBUTING."""
    return [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str) -> list[Block]:
    """The fenced blocks in order."""
    found = []
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        code = "".join(line[indent:] for line in match["code"].splitlines(keepends=True))
        found.append(Block(match["language"], code, text[: match.start("code")].count("\n") + 1))
    return found


def prose(text: str) -> list[str]:
    """The paragraphs and items of a page, without code, tables, headings, pictures and the addresses of links."""
    text = FENCE.sub("\n\n", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    kept, lines = [], text.splitlines()
    for line in lines:
        bare = line.strip()
        if line.startswith("    ") and not (kept and kept[-1]):  # an indented block; not the rest of an item
            continue
        if bare.startswith(("|", "#", "![", ":::", "!!!", "<", "- [", "---", "[!")):
            kept.append("")
        elif re.match(r"(-|\*|\d+\.) ", bare):
            kept += ["", re.sub(r"^(-|\*|\d+\.) ", "", bare)]
        else:
            kept.append(bare)
    paragraphs = [" ".join(part.split()) for part in "\n".join(kept).split("\n\n")]
    paragraphs = [re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", part) for part in paragraphs]
    paragraphs = [re.sub(r"`[^`]*`", "code", part) for part in paragraphs]
    return [part.replace("**", "").replace("*", "") for part in paragraphs if part]


def sentences(text: str) -> list[list[str]]:
    """The sentences of a page as lists of words; a word has a letter or a digit. Code in a line is one word."""
    found = []
    for paragraph in prose(text):
        for sentence in re.split(r"(?<=[.!?])[)\"”]? +(?=[A-ZΣμσγδτ0-9(\"“]|code)", paragraph):
            words = [word for word in sentence.split() if any(c.isalnum() for c in word)]
            if words:
                found.append(words)
    return found


def words(text: str) -> int:
    """How many words a page has; code blocks do not count, tables do."""
    text = FENCE.sub("\n\n", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    return sum(any(c.isalnum() for c in word) for word in text.split())
