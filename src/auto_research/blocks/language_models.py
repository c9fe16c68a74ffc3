"""Loading and growing language models without what broke on other machines. transformers is imported when needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from auto_research.runtime.errors import ConfigError, CorruptFile
from auto_research.runtime.files import read_json
from auto_research.runtime.seeds import torch_generator

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Encoders old enough to have been published without `model_type`: concrete model, configuration, tokenizer classes.
_UNNAMED = {"bert": ("BertModel", "BertConfig", "BertTokenizer")}
_BERT_FIELDS = {"hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"}


def new_rows(table: torch.Tensor, count: int, *, seed: int = 0, noise: float = 0.1) -> torch.Tensor:
    """Rows for new vocabulary entries: the mean of `table` plus Gaussian noise, [count, D] on its device and dtype.

    The noise has `noise` times the per-column standard deviation of the table, so new rows differ from each other and
    stay where the old ones are. No covariance and no factorisation: runs on a torch build without LAPACK, where
    transformers' own `mean_resizing` fails (it samples a multivariate normal).

    table: [V, D], V >= 1.  Drawn in float32 on the CPU from `seed`, the same on every device.
    """
    old = table.detach().to("cpu", torch.float32)
    draw = torch.randn(count, old.shape[1], generator=torch_generator("cpu", "new-rows", seed))
    rows = old.mean(0) + noise * old.std(0, unbiased=False) * draw
    return rows.to(device=table.device, dtype=table.dtype)


def grow_embeddings(model: PreTrainedModel, size: int, *, seed: int = 0, noise: float = 0.1) -> None:
    """Grow the vocabulary of a transformers model to `size` in place: input table, output head, configuration.

    Old rows keep their values bit for bit; tied weights stay tied. New rows of each table come from `new_rows`.
    Raises ConfigError when `size` is below the present vocabulary.
    """
    old_size = model.get_input_embeddings().weight.shape[0]
    if size < old_size:
        raise ConfigError(f"the vocabulary has {old_size} entries and cannot grow to {size}")
    if size == old_size:
        return
    model.resize_token_embeddings(size, mean_resizing=False)
    source = model.get_input_embeddings().weight
    tables = [("input", source)]
    head = model.get_output_embeddings()
    if head is not None and head.weight is not source:
        tables.append(("output", head.weight))
    with torch.no_grad():
        for name, weight in tables:
            drawn = new_rows(weight[:old_size], size - old_size, seed=seed + (name == "output"), noise=noise)
            weight[old_size:] = drawn


def load_encoder(folder: Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A local encoder checkpoint in evaluation mode, also one whose config.json lacks `model_type`.

    Reads local files only and runs no code of the checkpoint. dtype: of the weights, the checkpoint's when None.
    Raises CorruptFile without config.json, ConfigError when the type is missing and the fields are not BERT's.
    """
    import transformers

    kind = _unnamed_kind(folder)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if dtype is not None:
        options["dtype"] = dtype
    if kind is None:
        return transformers.AutoModel.from_pretrained(folder, **options).eval()
    model_class, config_class, _ = (getattr(transformers, name) for name in _UNNAMED[kind])
    return model_class.from_pretrained(
        folder, config=config_class(**read_json(Path(folder) / "config.json")), **options
    ).eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside `load_encoder`'s checkpoint, by concrete class where the configuration names no type."""
    import transformers

    kind = _unnamed_kind(folder)
    if kind is None:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return getattr(transformers, _UNNAMED[kind][2]).from_pretrained(folder, local_files_only=True)


def rebuilt_linear(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [..., in] times an INT8 weight, codes [out, in] with scale [out, 1], plus bias [out], in the dtype of `x`.

    Weight and bias follow the activation: a weight rebuilt as float32 cannot meet a bfloat16 activation.
    """
    from auto_research.runtime.precision import align, dequantize

    return nn.functional.linear(x, dequantize(codes, scale, x), None if bias is None else align(bias, x))


def _unnamed_kind(folder: Path) -> str | None:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CorruptFile(f"{folder} holds no config.json: not a checkpoint")
    config = read_json(path)
    if config.get("model_type"):
        return None
    if config.keys() >= _BERT_FIELDS:
        return "bert"
    raise ConfigError(f"{path} names no model_type and does not look like BERT: add the type")
