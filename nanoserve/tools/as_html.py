"""What does a notebook show instead of a repr?

Jupyter asks an object for `_repr_html_`. Two objects have one, which calls a function here:

    llm.engine.block_manager    blocks(): a map of the KV cache; each sequence has a colour
    outputs[0]                  output(): the prompt, the completions and how they ended

The HTML is plain text with colours, no script and no style sheet, so that it also reads well where
a site removes styles. Colours of text and background are the notebook's own, light or dark.
Everything that a user or a model has written is escaped.

Left out: pictures of what changes over time; nanoserve/extras/trace draws them.

vLLM: none.
"""

from __future__ import annotations

from html import escape

from nanoserve.block_manager import BlockManager
from nanoserve.output_processor import CompletionOutput, RequestOutput

# Okabe and Ito's, which readers with any kind of colour vision can tell apart; with black text.
COLOURS = ("#56B4E9", "#E69F00", "#3CC79A", "#E08FBE", "#F0E442", "#E8804A")
MOST_BLOCKS = 512  # a map has no more cells
MOST_NAMED = 12  # sequences in the legend
MOST_CHARS = 2000  # of one text
CELL = (
    "display:inline-block;min-width:2.2em;margin:1px;padding:1px 2px;text-align:center;"
    "border:1px solid rgba(128,128,128,0.6);border-radius:3px;"
)
FOUND = "background:rgba(128,128,128,0.3);"
FAINT = "opacity:0.65;"


def blocks(manager: BlockManager) -> str:
    """A cell for each KV block: its number, in the colour of the sequence that holds it."""
    owners: dict[int, list[int]] = {}
    for seq_id, table in manager.block_tables.items():
        for block_id in table:
            owners.setdefault(block_id, []).append(seq_id)
    pool, num_shown = manager.pool, min(manager.num_blocks, MOST_BLOCKS)
    colours = {seq: COLOURS[n % len(COLOURS)] for n, seq in enumerate(manager.block_tables)}
    cells = []
    for block_id in range(num_shown):
        held_by = owners.get(block_id, [])
        if held_by:
            share = 100 / len(held_by)  # several sequences: a stripe for each
            stripes = ",".join(
                f"{colours[seq]} {n * share:.0f}% {(n + 1) * share:.0f}%"
                for n, seq in enumerate(held_by)
            )
            style = f"background:linear-gradient(90deg,{stripes});color:#000;"
            title = "held by " + ", ".join(f"sequence {seq}" for seq in held_by)
        elif pool.block_hashes[block_id] is not None:
            style, title = FOUND, "free; its content can still be found"
        else:
            style, title = FAINT, "free"
        cells.append(f'<span style="{CELL}{style}" title="{title}">{block_id}</span>')
    num_found = sum(pool.block_hashes[block_id] is not None for block_id in pool.free_queue)
    more = f"<div>… and {manager.num_blocks - num_shown} more blocks</div>"
    legend = [
        f'<span style="{CELL}background:{colours[seq]};color:#000;">{len(table)}</span> '
        f"sequence {seq}"
        for seq, table in list(manager.block_tables.items())[:MOST_NAMED]
    ]
    if len(manager.block_tables) > MOST_NAMED:
        legend += [f"and {len(manager.block_tables) - MOST_NAMED} more sequences"]
    legend += [f'<span style="{CELL}{FOUND}">{num_found}</span> free, can be found by their prefix']
    legend += [f'<span style="{CELL}">{pool.num_free_blocks - num_found}</span> free']
    return (
        f"<div><b>KV cache</b>: {manager.num_blocks} blocks of {manager.block_size} tokens; "
        f"{manager.num_hit_tokens} of {manager.num_queried_tokens} tokens were found in the prefix "
        f'cache</div><div style="font-family:monospace;line-height:1.6;">{"".join(cells)}</div>'
        f"{more if manager.num_blocks > num_shown else ''}"
        f"<div>{' &nbsp; '.join(legend)}</div>"
    )


def output(result: RequestOutput) -> str:
    """The request's name, its prompt, and each completion with its end."""
    about = (
        f"{len(result.prompt_token_ids)} prompt tokens, {result.num_cached_tokens} of them cached"
    )
    prompt = "[token ids]" if result.prompt is None else result.prompt
    about += "" if result.finished else ", not finished"
    return (
        f'<div><b>{escape(result.request_id)}</b> <span style="{FAINT}">{about}</span></div>'
        f'<div style="white-space:pre-wrap;{FAINT}">{_shorten(prompt)}</div>'
        + "".join(_completion(completion) for completion in result.outputs)
    )


def _completion(completion: CompletionOutput) -> str:
    """One completion's text, and behind it how long it is and why it ended."""
    end = f"{len(completion.token_ids)} tokens"
    if completion.finish_reason:
        end += f", {completion.finish_reason}"
        reason = completion.stop_reason
        end += "" if reason is None else f": {escape(str(reason))}"
    return (
        '<div style="white-space:pre-wrap;border-left:3px solid rgba(128,128,128,0.6);'
        f'margin-top:4px;padding-left:8px;">{_shorten(completion.text)} '
        f'<span style="{FAINT}">({end})</span></div>'
    )


def _shorten(text: str) -> str:
    """Escaped; the middle of a very long text is left out."""
    if len(text) > MOST_CHARS:
        half = MOST_CHARS // 2
        text = f"{text[:half]} … {text[-half:]}"
    return escape(text)
