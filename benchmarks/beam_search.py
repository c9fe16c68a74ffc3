"""Users per second of the constrained beam here and of transformers' `generate` on the same network and weights.

python benchmarks/beam_search.py --users 64 --out results/benchmarks/beam_search.json

A TIGER-sized encoder-decoder (width 64, 2 + 2 layers, 20 items of 4 codes as history) with random weights searches 1,682
and 100,000 synthetic items. The reference wraps the very same modules into a transformers model with its own key-value
cache and gives `generate` a `prefix_allowed_tokens_fn` that reads ready lists of tokens from a dictionary of all
prefixes. Neither side leaves out seen items, since such a function would have to count the leaves of every user; the
search here is measured with 100 seen items as well. On a small catalogue both must return the same lists.

Seconds are CPU seconds of one thread (other work on the machine does not count). Memory is the peak resident size of a
search beyond what the process held before it (model and trie or dictionary), in a process per side and catalogue.
Expected: a ratio of at least 5. Growth over items and width is printed, and drawn beside the JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

SIDES = ("here", "transformers")
HISTORY, EXPECTED, SEEN = 20, 5.0, 100


def build(items: int):
    """(table, trie, model) of a synthetic catalogue; the same on every call."""
    import torch

    from auto_research.blocks.prefix_trie import PrefixTrie
    from auto_research.blocks.semantic_ids import SIDVocab, resolve_collisions
    from auto_research.blocks.sid_models import SIDConfig, SIDSeq2Seq

    size = 64 if items < 10_000 else 256
    codes = np.random.default_rng(items).integers(0, size, (items, 3))
    table = resolve_collisions(codes, (size, size, size), "suffix")
    torch.manual_seed(0)
    config = SIDConfig(width=64, heads=4, encoder_layers=2, layers=2, hidden=256, history=HISTORY, prefix=1)
    model = SIDSeq2Seq(SIDVocab.of(table, users=128), config).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(3)  # spread the scores as training does
    return table, PrefixTrie.of(table), model


def histories(table, model, users: int):
    """Source tokens int64[users, 1 + 20 * L] and their mask, a quarter of the users with a short history."""
    import torch

    rng = np.random.default_rng(7)
    items = rng.integers(1, table.n_items + 1, (users, HISTORY))
    user = model.vocab.user_token(np.arange(users))[:, None]
    tokens = np.concatenate([user, model.vocab.item_tokens(table)[items].reshape(users, -1)], axis=1)
    mask = np.ones(tokens.shape, dtype=bool)
    mask[::4, 1 : 1 + tokens.shape[1] // 2] = False
    return torch.from_numpy(tokens), torch.from_numpy(mask)


def searcher_here(table, trie, model, width: int, seen: bool = False):
    """Function (tokens, mask) -> codes int64[B, width, L], scores [B, width]."""
    import torch

    from auto_research.blocks.beam_search import constrained_beam
    from auto_research.blocks.sid_models import SIDStep

    def search(tokens, mask):
        with torch.no_grad():
            memory = model.encode(tokens, mask)
        alive = None
        if seen:
            items = np.random.default_rng(1).integers(1, table.n_items + 1, (len(tokens), SEEN))
            alive = trie.alive(torch.from_numpy(items))
        beams = constrained_beam(SIDStep(model), memory, trie, width, alive=alive)
        return beams.codes, beams.logp

    return search


def searcher_transformers(table, trie, model, width: int):
    """The same by `generate` with a prefix function over a dictionary of all prefixes."""
    import torch

    wrapped = wrap(model)
    children: dict[tuple[int, ...], list[int]] = {}
    for row in model.vocab.tokens(table.leaves).tolist():
        for level, token in enumerate(row):
            known = children.setdefault(tuple(row[:level]), [])
            if not known or known[-1] != token:  # tuples are sorted
                known.append(token)
    nothing = [model.vocab.pad]
    offsets = torch.from_numpy(model.vocab.offsets.copy())

    def allowed(_, sent):
        return children.get(tuple(sent[1:].tolist()), nothing)

    def search(tokens, mask):
        out = wrapped.generate(
            input_ids=tokens,
            attention_mask=mask.long(),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=table.levels,
            do_sample=False,
            length_penalty=0.0,
            prefix_allowed_tokens_fn=allowed,
            return_dict_in_generate=True,
            output_scores=True,
            use_cache=True,
        )
        codes = out.sequences[:, 1:] - offsets
        return codes.view(len(tokens), width, -1), out.sequences_scores.view(len(tokens), width)

    return search


def wrap(model):
    """The modules of a SIDSeq2Seq as a transformers encoder-decoder with a DynamicCache."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

    class Config(PreTrainedConfig):
        model_type = "sid-seq2seq"

    class Encoder(nn.Module):
        main_input_name = "input_ids"

        def forward(self, input_ids, attention_mask=None, **_):
            return BaseModelOutput(last_hidden_state=model.encode(input_ids, attention_mask.bool()).states)

    class Wrapped(PreTrainedModel, GenerationMixin):
        config_class, main_input_name = Config, "input_ids"

        def __init__(self, config):
            super().__init__(config)
            self.core, self.reader = model, Encoder()

        def get_encoder(self, modality=None):
            return self.reader

        def forward(self, decoder_input_ids=None, attention_mask=None, encoder_outputs=None, cache=None, **_):
            own, cross = cache.self_attention_cache, cache.cross_attention_cache
            known = own.get_seq_length()
            length = decoder_input_ids.shape[1]
            x = model.embedding(decoder_input_ids) + model.target[known : known + length]
            position = torch.arange(known, known + length).expand(len(x), -1)
            for n, block in enumerate(model.blocks):
                q, k, v = block.project(x, position)
                k, v = own.update(k, v, n)
                read = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
                x = x + block.out(read.transpose(1, 2).flatten(2))
                if cache.is_updated.get(n):
                    k, v = cross.layers[n].keys, cross.layers[n].values
                else:
                    k, v = cross.update(*block.remember(encoder_outputs.last_hidden_state), n)
                    cache.is_updated[n] = True
                q = block.query(block.norm_cross(x)).unflatten(2, (block.heads, -1)).transpose(1, 2)
                read = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask.bool()[:, None, None])
                x = x + block.cross_out(read.transpose(1, 2).flatten(2))
                x = x + block.ffn(block.norm_ffn(x))
            return Seq2SeqLMOutput(logits=F.linear(model.norm(x), model.embedding.weight), cache=cache)

    vocab = model.vocab
    config = Config(
        is_encoder_decoder=True,
        vocab_size=vocab.size,
        num_hidden_layers=len(model.blocks),
        hidden_size=model.config.width,
        num_attention_heads=model.config.heads,
        pad_token_id=vocab.pad,
        decoder_start_token_id=vocab.bos,
        eos_token_id=None,
    )
    wrapped = Wrapped(config).eval()
    wrapped.generation_config = GenerationConfig(pad_token_id=vocab.pad, decoder_start_token_id=vocab.bos)
    return wrapped


def check() -> float:
    """Largest difference of scores on a small catalogue; stops when the lists differ."""
    table, trie, model = build(300)
    source = histories(table, model, 6)
    ours, scores = searcher_here(table, trie, model, 10)(*source)
    theirs, reference = searcher_transformers(table, trie, model, 10)(*source)
    if not ours.equal(theirs):
        sys.exit("the two searches return different lists")
    return float((scores - reference).abs().max())


def worker(side: str, items: int, widths: list[int], users: int, batch: int) -> list[dict]:
    """Measurements of one side on one catalogue, the smallest width first."""
    import torch

    from auto_research.runtime.devices import peak_memory, reset_peak_memory

    cpu = torch.device("cpu")
    table, trie, model = build(items)
    kinds = {"": {}} if side == "transformers" else {"": {}, f", {SEEN} seen": {"seen": True}}
    build_search = searcher_here if side == "here" else searcher_transformers
    tokens, mask = histories(table, model, users)
    encoding = encode_seconds(model, tokens, mask, batch) / users
    rows = []
    for width in sorted(widths):
        for label, options in kinds.items():
            search = build_search(table, trie, model, width, **options)
            search(tokens[:2], mask[:2])
            reset_peak_memory(cpu)
            held, start = peak_memory(cpu), time.process_time()
            for begin in range(0, users, batch):
                search(tokens[begin : begin + batch], mask[begin : begin + batch])
            seconds = time.process_time() - start
            rows.append(
                {
                    "side": side + label,
                    "items": items,
                    "width": width,
                    "users_per_second": users / seconds,
                    "encode_ms": 1e3 * encoding,
                    "peak_mib": (peak_memory(cpu) - held) / 2**20,
                    "process_mib": held / 2**20,
                    "trie_mib": trie.bytes() / 2**20,
                }
            )
    return rows


def encode_seconds(model, tokens, mask, batch: int) -> float:
    """CPU seconds of encoding every user once, which both sides do with the same code."""
    import torch

    with torch.no_grad():
        model.encode(tokens[:2], mask[:2])
        start = time.process_time()
        for begin in range(0, len(tokens), batch):
            model.encode(tokens[begin : begin + batch], mask[begin : begin + batch])
    return time.process_time() - start


def picture(rows: list[dict]) -> str:
    """SVG of seconds per user over items (one line per side and width) and over width."""
    from auto_research.results.curves import WIDTH, _study

    top, panels = 20, []
    for x, other in (("items", "width"), ("width", "items")):
        lines: dict[str, list] = {}
        for row in rows:
            lines.setdefault(f"{row['side']}, {other} {row[other]}", []).append((row[x], 1e3 / row["users_per_second"]))
        lines = {label: sorted(line) for label, line in lines.items() if len(line) > 1}
        if lines:
            height, draw = _study("beam search", {"log": True, "x": x, "y": "CPU ms per user", "lines": lines})
            panels.append(f'<g transform="translate(0,{top})">{draw}</g>')
            top += height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>{"".join(panels)}</svg>\n'
    )


def show(rows: list[dict]) -> None:
    """One line per measurement: ratio to transformers with and without the encoder, growth from the side's first row."""
    reference = {(row["items"], row["width"]): row for row in rows if row["side"] == "transformers"}
    encode = sum(row["encode_ms"] for row in rows) / len(rows)
    print(
        f"{'side':<16}{'items':>8}{'width':>6}{'users/s':>9}{'ratio':>7}{'search':>8}{'growth':>8}{'peak MiB':>10}{'held':>6}"
    )
    smallest = []
    for row in rows:
        first = next(r for r in rows if r["side"] == row["side"])
        ratios, other = "", reference.get((row["items"], row["width"]))
        if other is not None and other is not row:
            whole, theirs = (1e3 / r["users_per_second"] for r in (row, other))
            ratios = f"{theirs / whole:>7.1f}{(theirs - encode) / (whole - encode):>8.1f}"
            smallest += [theirs / whole] if row["side"] == "here" else []
        print(
            f"{row['side']:<16}{row['items']:>8}{row['width']:>6}{row['users_per_second']:>9.1f}{ratios:>15}"
            f"{first['users_per_second'] / row['users_per_second']:>7.1f}x{row['peak_mib']:>10.0f}{row['process_mib']:>6.0f}"
        )
    print(
        f"encoder {encode:.2f} ms a user on both sides ('search': ratio without it); trie {rows[-1]['trie_mib']:.1f} MiB"
    )
    if smallest:
        print(f"smallest ratio {min(smallest):.1f}, expected at least {EXPECTED:g}")


def main() -> None:
    """Check the lists, measure every side and catalogue in a process of its own, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[1682, 100_000])
    parser.add_argument("--widths", type=int, nargs="+", default=[20, 50])
    parser.add_argument("--users", type=int, default=64, help="users searched for, on either side")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/beam_search.json"))
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "ITEMS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        import torch

        torch.set_num_threads(1)
        side, items = options.worker[0], int(options.worker[1])
        if side == "check":
            print(json.dumps(check()))
        else:
            print(json.dumps(worker(side, items, options.widths, options.users, options.batch)))
        return

    def run(side: str, items: int):
        command = [sys.executable, __file__, "--worker", side, str(items), "--users", str(options.users)]
        command += ["--batch", str(options.batch), "--widths", *map(str, options.widths)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"worker {side} over {items} items failed")
        return json.loads(done.stdout.splitlines()[-1])

    from auto_research.runtime.files import write_json, write_text

    difference = run("check", 0) if "transformers" in options.sides else None
    rows = [row for side in options.sides for items in sorted(options.items) for row in run(side, items)]
    show(rows)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"users": options.users, "batch": options.batch, "score_difference": difference}
    write_json(options.out, {"settings": settings, "rows": rows})
    write_text(options.out.with_suffix(".svg"), picture(rows))
    print(f"same lists on the small catalogue, scores differ by at most {difference}; {options.out}")


if __name__ == "__main__":
    main()
