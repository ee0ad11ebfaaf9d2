"""SVG by hand: shapes, text that is always escaped, light and dark colours, and frames in time.

GitHub shows an SVG file in a README as an <img>: no script runs in it, no font is loaded. CSS does
work: `prefers-color-scheme` chooses the colours, and keyframes show and hide groups of shapes.

    film = Film([1.0, 2.0, 1.0])                # three frames, their seconds
    film.add(0, rect(0, 0, 10, 10, "panel"))    # in frame 0 ...
    film.add(1, rect(0, 0, 10, 10, "panel"))    # ... and still there in frame 1: one element
    film.add(2, text(5, 5, "a < b"))
    document(20, 20, "title", "description", film.style(), film.body(still=1))

The colours of requests are style.py's; names always stand beside the colours.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

FONT = (
    "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,"
    "'PingFang SC','Microsoft YaHei','Noto Sans CJK SC',sans-serif"
)
NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

# class: (property, in light mode, in dark mode)
PALETTE = {
    "back": ("fill", "#ffffff", "#0d1117"),
    "ink": ("fill", "#1f2328", "#f0f6fc"),
    "faint": ("fill", "#59636e", "#9198a1"),
    "panel": ("fill", "#f6f8fa", "#161b22"),
    "grey": ("fill", "#dfe3e8", "#30363d"),
    "edge": ("stroke", "#c4ccd4", "#484f58"),
    "line": ("stroke", "#59636e", "#9198a1"),
    "old": ("fill-opacity", ".26", ".36"),
    "new": ("fill-opacity", ".62", ".66"),
}


def palette() -> str:
    """The CSS of PALETTE. An outline ("edge", "line") has no fill."""
    light = [f".{name}{{{key}:{value}}}" for name, (key, value, _) in PALETTE.items()]
    dark = [f".{name}{{{key}:{value}}}" for name, (key, _, value) in PALETTE.items()]
    base = f"text{{font-family:{FONT}}}.edge,.line{{fill:none}}.bold{{font-weight:600}}"
    return base + "".join(light) + f"@media (prefers-color-scheme:dark){{{''.join(dark)}}}"


def escape(content: str) -> str:
    """For HTML and XML; \ufffd stands for what XML and UTF-8 do not have, such as \\x1b."""
    return html.escape(NOT_IN_XML.sub("\ufffd", content))


def number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def element(name: str, content: str | None = None, **attributes: object) -> str:
    """One element. Attributes that are None are left out; class_ is class, font_size font-size."""
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = number(value) if isinstance(value, (int, float)) else escape(str(value))
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    return f"<{' '.join(parts)}/>" if content is None else f"<{' '.join(parts)}>{content}</{name}>"


def rect(
    x: float, y: float, width: float, height: float, class_: str | None = None, **more: Any
) -> str:
    return element("rect", x=x, y=y, width=width, height=height, class_=class_, **more)


def text(
    x: float, y: float, content: str, size: float = 15, class_: str = "ink", **more: Any
) -> str:
    """One line of text; `anchor` is "middle" or "end"."""
    anchor = more.pop("anchor", None)
    return element(
        "text",
        escape(content),
        x=x,
        y=y,
        font_size=size,
        class_=class_,
        text_anchor=anchor,
        **more,
    )


def text_width(content: str, size: float, letter_width: float = 0.58) -> float:
    """Roughly: bold letters of the fonts above are 0.58 of their size wide, others 0.52, Chinese
    ones 1."""
    return size * sum(1.0 if ord(letter) > 0x2E80 else letter_width for letter in content)


def document(
    width: int, height: int, title: str, description: str, style: str, body: Iterable[str]
) -> str:
    """A whole SVG file on a rounded background of its own (a page may have another one)."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(description)}</desc>',
        f"<style>{palette()}{style}</style>",
        rect(0, 0, width, height, "back", rx=10),
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


class Film:
    """Elements that are visible in some frames. What stays from one frame to the next is written
    once. Within a layer, elements of one frame must not overlap; higher layers lie on top.
    """

    def __init__(self, seconds: list[float]) -> None:
        """`seconds`: how long each frame is shown."""
        self.seconds = seconds
        self._seen: dict[tuple[int, str], list[int]] = {}  # (layer, element) -> frames

    def add(self, frame: int, *elements: str, layer: int = 0) -> None:
        for each in elements:
            frames = self._seen.setdefault((layer, each), [])
            if not frames or frames[-1] != frame:
                frames.append(frame)

    def _groups(self) -> dict[tuple[int, int, int], list[str]]:
        """(layer, first frame, frame behind the last one) -> elements."""
        groups: dict[tuple[int, int, int], list[str]] = {}
        for (layer, each), frames in self._seen.items():
            start = 0
            for index in range(1, len(frames) + 1):
                if index == len(frames) or frames[index] != frames[index - 1] + 1:
                    span = (layer, frames[start], frames[index - 1] + 1)
                    groups.setdefault(span, []).append(each)
                    start = index
        return dict(sorted(groups.items()))

    def style(self) -> str:
        """Keyframes for each span of frames. Without animation only the still frame is visible."""
        total, count = sum(self.seconds), len(self.seconds)
        rules = [
            ".f{visibility:hidden}.s{visibility:visible}",
            f".f{{animation-duration:{number(total)}s;animation-timing-function:step-end;"
            "animation-iteration-count:infinite}",
            "@media (prefers-reduced-motion:reduce){.f{animation:none!important}}",
        ]
        for first, end in sorted({span[1:] for span in self._groups()}):
            if (first, end) == (0, count):
                continue
            begin, stop = (100 * sum(self.seconds[:frame]) / total for frame in (first, end))
            shown, hidden = "{visibility:visible}", "{visibility:hidden}"
            frames = f"0%{hidden}{begin:.3f}%{shown}" if first else f"0%{shown}"
            frames += f"{stop:.3f}%{hidden}" if end < count else ""
            rules.append(f"@keyframes k{first}-{end}{{{frames}}}")
            rules.append(f".k{first}-{end}{{animation-name:k{first}-{end}}}")
        return "".join(rules)

    def body(self, still: int) -> list[str]:
        """The groups; `still` is the frame for readers who want no motion."""
        lines = []
        for (_, first, end), elements in self._groups().items():
            if (first, end) == (0, len(self.seconds)):
                lines += elements
                continue
            classes = f"f{' s' if first <= still < end else ''} k{first}-{end}"
            lines.append(element("g", "".join(elements), class_=classes))
        return lines

    def groups_by_step(self) -> list[str]:
        """The groups with the steps in which they are visible, for a script: [data-from, data-to).
        Without a script, the first step is visible."""
        return [
            element(
                "g",
                "".join(elements),
                class_="f" if first else "f on",
                data_from=first,
                data_to=end,
            )
            for (_, first, end), elements in self._groups().items()
        ]
