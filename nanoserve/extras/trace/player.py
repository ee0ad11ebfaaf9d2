"""A run with a slider: one page that needs nothing else.

    recorder.play()                          in a notebook
    recorder.save("run.html")                a page for any browser

The page has all steps as one SVG (movie.py), a slider, buttons and a few lines of script. In a
notebook it stands in a frame (iframe): several players do not disturb each other, and GitHub, which
runs no script, shows one line of text in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from nanoserve.extras.trace.frames import Frame
from nanoserve.extras.trace.movie import WIDTH, Painter
from nanoserve.extras.trace.svg import escape, palette, rect


class Player:
    """A run with a slider, for a notebook; `to_html` makes a page of its own."""

    def __init__(
        self,
        frames: Iterable[Frame],
        title: str = "",
        questions: Mapping[str, str] | None = None,
        language: str = "en",
    ) -> None:
        self._painter = Painter(frames, title, questions, language)

    def __repr__(self) -> str:
        return self._painter.words["player"].format(len(self._painter.scenes))

    def to_html(self) -> str:
        """One page with all steps; it loads nothing. Arrow keys work as the buttons do."""
        painter = self._painter
        values = {
            "title": escape(painter.title),
            "style": palette() + STYLE,
            "count": str(len(painter.scenes)),
            "first": str(painter.scenes[0].frame.number),
            "view": f"0 0 {WIDTH} {painter.height}",
            "back": rect(0, 0, WIDTH, painter.height, "back", rx=10),
            "steps": "\n".join(painter.film.groups_by_step()),
        }
        return re.sub(r"@(\w+)@", lambda match: values[match[1]], PAGE)

    def _repr_html_(self) -> str:
        """The page in a frame, as high as it needs to be."""
        height = self._painter.height + 64
        style = f"width:100%;max-width:{WIDTH + 24}px;height:{height}px;border:0"
        page = self.to_html().replace("&", "&amp;").replace("<", "&lt;").replace("'", "&#39;")
        return f"<p>{escape(repr(self))}</p><iframe style='{style}' srcdoc='{page}'></iframe>"


STYLE = (
    "body{margin:0 auto;max-width:760px;padding:4px;font:14px system-ui,sans-serif;color:#59636e}"
    "form{display:flex;gap:8px;align-items:center;margin:0 0 6px}input{flex:1}"
    "button{font:inherit;min-width:2.6em;padding:2px 8px}output{min-width:7em;text-align:right}"
    "svg{display:block;width:100%;height:auto}.f{visibility:hidden}.f.on{visibility:visible}"
)
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>@title@</title><style>@style@</style></head>
<body>
<form onsubmit="return false">
<button type="button" id="back" aria-label="previous step">◀</button>
<button type="button" id="play" aria-label="play or stop">play</button>
<button type="button" id="next" aria-label="next step">▶</button>
<input type="range" id="step" min="0" max="0" value="0" aria-label="step">
<output id="where"></output>
</form>
<svg xmlns="http://www.w3.org/2000/svg" viewBox="@view@" role="img" aria-label="@title@">
@back@
@steps@
</svg>
<script>
const count = @count@, first = @first@, find = id => document.getElementById(id);
const slider = find("step"), groups = document.querySelectorAll(".f");
let timer = null;
slider.max = count - 1;
function show(index) {
  index = Math.max(0, Math.min(count - 1, index));
  slider.value = index;
  find("where").textContent = "step " + (first + index) + " of " + (first + count - 1);
  for (const g of groups)
    g.classList.toggle("on", +g.dataset.from <= index && index < +g.dataset.to);
}
function move(by) { stop(); show(+slider.value + by); }
function stop() { clearInterval(timer); timer = null; find("play").textContent = "play"; }
function tick() { +slider.value < count - 1 ? show(+slider.value + 1) : stop(); }
slider.oninput = () => { stop(); show(+slider.value); };
find("back").onclick = () => move(-1);
find("next").onclick = () => move(1);
find("play").onclick = () => {
  if (timer) return stop();
  if (+slider.value === count - 1) show(0);
  timer = setInterval(tick, 900);
  find("play").textContent = "stop";
};
document.onkeydown = event => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) { event.preventDefault(); move(by); }
};
show(0);
</script>
</body></html>
"""
