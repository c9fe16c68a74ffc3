"""The first layers of a pretrained causal language model as a trunk over vectors, adapted with LoRA (arXiv:2106.09685).

The checkpoint is a prepared `causal_lm` folder (config.json, model.safetensors) of a Llama-like model; its vocabulary is
neither loaded nor used. transformers and peft are imported when needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from auto_research.runtime.errors import ConfigError, CorruptFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def load_layers(folder: Path | str, layers: int | None = None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The first `layers` (None: all) layers and the final norm of a local checkpoint, in evaluation mode.

    Reads local files only and runs no code of the checkpoint. Raises ConfigError without the extra 'llm' or when the
    model has fewer layers, CorruptFile when a weight is missing.
    """
    try:
        from safetensors import safe_open
        from transformers import AutoConfig, AutoModel
    except ImportError as error:
        raise ConfigError(
            f"a language model needs {error.name}: install the extra 'llm' (pip install -e '.[llm]')"
        ) from None
    folder = Path(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise ConfigError(f"{layers} layers of a model that has {config.num_hidden_layers}")
        config.num_hidden_layers = layers
    config.vocab_size, config.pad_token_id, config.bos_token_id, config.eos_token_id = 1, None, None, None
    model = AutoModel.from_config(config).to(dtype)
    own = {name: p for name, p in model.named_parameters() if not name.startswith("embed_tokens")}
    with torch.no_grad(), safe_open(folder / "model.safetensors", "pt") as file:
        stored = set(file.keys())
        for name, p in own.items():
            if f"model.{name}" not in stored:
                raise CorruptFile(f"{folder / 'model.safetensors'} has no weight model.{name}")
            p.copy_(file.get_tensor(f"model.{name}"))
    model.embed_tokens.weight.requires_grad_(False)  # vectors come from outside
    return model.eval()


class LanguageModelTrunk(nn.Module):
    """Vectors [B, T, D] and their mask bool[B, T] (filled from the left) -> states [B, T, D], causal.

    Linear(D, H), the layers, Linear(H, D). Only the two projections and LoRA of rank `rank` on every attention
    projection are trained; LoRA stays float32 also where the layers are bfloat16.
    """

    def __init__(self, width: int, layers: PreTrainedModel, rank: int = 8, alpha: float = 16.0):
        super().__init__()
        from peft import LoraConfig, inject_adapter_in_model

        hidden = layers.config.hidden_size
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(PROJECTIONS), bias="none")
        self.layers = inject_adapter_in_model(config, layers)
        self.inward, self.outward = nn.Linear(width, hidden), nn.Linear(hidden, width)
        for p in self.layers.parameters():
            if p.requires_grad:
                p.data = p.data.float()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        read = self.layers(
            inputs_embeds=self.inward(x).to(self.layers.dtype),
            attention_mask=mask.long(),
            position_ids=places,
            use_cache=False,
        )
        return self.outward(read.last_hidden_state.to(x.dtype))
