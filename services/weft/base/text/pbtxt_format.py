"""Canonical layout of protobuf text format; comments stay.

What stands between brackets has a line for each field if the author broke the line after the opening one, if a comment
is in it, or if it does not fit on a line.
"""

from dataclasses import dataclass

from weft.base.text.pbtxt_scan import TOKEN

WIDTH = 120
_CLOSING = ("}", "]")
_SAME = {"<": "{", ">": "}"}


@dataclass(slots=True, eq=False)
class _Token:
    kind: str
    text: str
    num_breaks: int  # of the line, before it
    partner: int = 0  # of an opening bracket: index of the closing one
    is_broken: bool = False  # of an opening bracket
    is_alone: bool = False  # the only message of a list, whose brackets stand on its lines

    @property
    def on_a_line(self) -> str:
        return {",": "", ":": "", "#": "  "}.get(self.text[0], " ") + self.text


def format_pbtxt(text: str) -> str:
    """Lay out a text that parses: two spaces a level, up to 120 characters a line, at most one empty line."""
    tokens = _tokens(text)
    lines = [""]
    brackets: list[_Token] = []
    before: _Token | None = None
    has_name = False  # what comes is the value of a field
    for i, token in enumerate(tokens):
        around = brackets[-1] if brackets else None
        in_list, is_broken = around is not None and around.text == "[", around is None or around.is_broken
        if token.text in _CLOSING:
            brackets.pop()
        is_field = token.kind == "name" and not in_list and not has_name
        if before is None or before.kind == "comment":
            starts_line = True
        elif token.kind == "comment" or token.kind == before.kind == "string":
            starts_line = token.num_breaks > 0
        elif before is around or token.text in _CLOSING:
            starts_line = is_broken
        elif in_list:
            is_full = len(lines[-1]) + len(token.text) + 2 > WIDTH
            breaks = token.text == "{" or token.num_breaks > 0 or is_full
            starts_line = is_broken and before.text == "," and breaks
        else:
            starts_line = is_field and is_broken
        if starts_line:
            is_value = not (in_list or is_field or token.kind == "comment" or token.text in _CLOSING)
            is_apart = token.num_breaks > 1 and before is not around and token.text not in _CLOSING
            level = sum(bracket.is_broken for bracket in brackets) + is_value
            lines += [*[""] * is_apart, "  " * level + token.text]
        else:
            lines[-1] += token.on_a_line
        if token.partner:
            behind = tokens[i + 1 : token.partner + token.is_alone + 1]
            is_wide = len(lines[-1]) + sum(len(one.on_a_line) for one in behind) > WIDTH
            token.is_broken = (token.is_broken or is_wide) and token.partner > i + 1 and not behind[0].is_alone
            brackets.append(token)
        if token.kind != "comment":
            has_name = is_field or (has_name and token.text == ":")
        before = token
    return "\n".join(lines[1:]) + "\n" * bool(tokens)


def _tokens(text: str) -> list[_Token]:
    """Tokens and comments, without the separators of fields and the colons before messages."""
    found: list[_Token] = []
    brackets: list[int] = []
    num_breaks = 0
    for match in TOKEN.finditer(text.removeprefix("\ufeff")):
        word = _SAME.get(match[0], match[0]).rstrip()
        around = found[brackets[-1]] if brackets else None
        if not word or (word in (",", ";") and (around is None or around.text == "{")):
            num_breaks += match[0].count("\n")
            continue
        if around is not None and word.startswith("#"):
            around.is_broken = True
        if word == "{" and [one.text for one in found[-2:]][-1 - (found[-1].text == "[") :][:1] == [":"]:
            del found[-1 - (found[-1].text == "[")]
            brackets = [at - (at == len(found)) for at in brackets]
        if word in ("{", "["):
            brackets.append(len(found))
        elif around is not None and word in _CLOSING:
            first = found[brackets.pop() + 1 :][:1]
            around.partner = len(found)
            around.is_broken |= any(one.num_breaks for one in first)
            if word == "]" and first and first[0].partner == len(found) - 1 and not first[0].num_breaks:
                first[0].is_alone = True
            if brackets and around.is_broken:
                found[brackets[-1]].is_broken = True
        found.append(_Token("comment" if word.startswith("#") else match.lastgroup or "", word, num_breaks))
        num_breaks = 0
    return found
