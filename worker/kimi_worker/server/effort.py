"""The message that tells K3 how much to think. Its words are the release's, read from the checkpoint's own encoder.

That encoder is Python code of whoever made the checkpoint: it is parsed and never run.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENCODER_FILE = "encoding_k3.py"
DEFAULT_EFFORT = "max"
EFFORTS = ("low", "medium", "high", "max")
"""All that a release has known; one need not know them all."""
_EFFORTS_UNSAID = ("low", "high", "max")

_HOLE = "\0"
"""Stands where the code puts a value in."""
_SAYS_EFFORT = f"`thinking_effort={_HOLE}`"


class EncoderError(Exception):
    """The checkpoint's encoder does not show the message; the text says why, for whoever asked for thinking."""


@dataclass(frozen=True, slots=True)
class EffortMessage:
    """The body of the system message of type `thinking-effort`."""

    _text: str
    efforts: tuple[str, ...]
    """Those that the message itself names."""

    def body(self, effort: str) -> str:
        return self._text.replace(_HOLE, effort)


def read_effort_message(checkpoint: Path) -> EffortMessage:
    """Find the message in the checkpoint's encoder. Raises EncoderError."""
    path = checkpoint / ENCODER_FILE
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise EncoderError(f"{ENCODER_FILE}, which holds the words for it, is not in the checkpoint") from error
    except (SyntaxError, ValueError) as error:
        raise EncoderError(f"the checkpoint's {ENCODER_FILE} is not Python: {error}") from error
    constants = _constants(tree)
    texts = {_text(node, constants).strip() for node in ast.walk(tree) if isinstance(node, ast.expr)}
    found = [text for text in texts if _SAYS_EFFORT in text]
    # an expression that joins texts shows its parts too
    whole = [text for text in found if not any(text != other and text in other for other in found)]
    if len(whole) != 1 or whole[0].count(_HOLE) != 1:
        raise EncoderError(
            f"the checkpoint's {ENCODER_FILE} shows {len(whole)} texts with `thinking_effort=...`, not one"
        )
    named = re.findall(r"`(\w+)`", whole[0])
    return EffortMessage(whole[0], tuple(effort for effort in EFFORTS if effort in named) or _EFFORTS_UNSAID)


def _constants(tree: ast.Module) -> Mapping[str, ast.expr]:
    """Texts that the module gives a name."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _text(node: ast.expr, constants: Mapping[str, ast.expr]) -> str:
    """What an expression spells, with a hole for everything that is known only when it runs."""
    text = _HOLE
    match node:
        case ast.Constant(value=str(text)):
            pass
        case ast.JoinedStr(values=parts):
            text = "".join(_text(part, constants) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            text = _text(left, constants) + _text(right, constants)
        case ast.BinOp(left=left, op=ast.Mod()):
            text = _text(left, constants).replace("%s", _HOLE)
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            text = re.sub(r"\{\w*\}", _HOLE, _text(template, constants))
        case ast.Call(func=ast.Attribute(value=separator, attr="join"), args=[ast.List() | ast.Tuple() as parts]):
            text = _text(separator, constants).join(_text(part, constants) for part in parts.elts)
        case ast.Name(id=name) if name in constants:
            # of what it is made is not looked up again: a name may stand for itself
            text = _text(constants[name], {})
    return text
