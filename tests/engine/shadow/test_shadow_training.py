"""Training on the shadow device: loss curves, checkpoints, resumption, memory."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from both_devices import assert_equal_runs
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach

from auto_research.runtime.seeds import restore_rng, rng_state


def _model():
    return nn.Sequential(
        nn.Embedding(11, 6), nn.Flatten(), nn.Dropout(0.2), nn.Linear(18, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def _step(model, optimizer, device):
    items, labels = torch.randint(11, (16, 3)).to(device), torch.randint(3, (16,)).to(device)
    loss = F.cross_entropy(model(items), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.item()


OPTIMIZERS = {
    "sgd": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, **k),
    "adam": lambda p, **k: torch.optim.Adam(p, lr=0.01, amsgrad=True, **k),
    "adamw": lambda p, **k: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, **k),
    "adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.1, **k),
    "rmsprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.01, **k),
}


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loss_curve_and_weights_equal_cpu(name, foreach):
    def program(device):
        model = _model().to(device)
        optimizer = OPTIMIZERS[name](model.parameters(), foreach=foreach)
        curve = [_step(model, optimizer, device) for _ in range(12)]
        return [torch.tensor(curve, device=device), *model.state_dict().values()]

    assert_equal_runs(program, rtol=1e-4, atol=1e-5)


def test_the_multi_tensor_path_is_the_default_as_on_cuda():
    model = _model().to("shadow")
    _, foreach = _default_to_fused_or_foreach(list(model.parameters()), differentiable=False)
    assert foreach


def test_moving_a_module_keeps_ties_and_optimizers():
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["table"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model["table"].weight
    model.to("shadow")
    assert model["head"].weight is model["table"].weight is before
    assert isinstance(before, nn.Parameter)
    was = before.detach().clone()
    model["head"](model["table"](torch.tensor([1], device="shadow"))).sum().backward()
    optimizer.step()
    assert not torch.equal(was, model["table"].weight)
    model.to("cpu")
    assert model["head"].weight is model["table"].weight is before
    assert before.grad.device.type == "cpu"
    assert model["table"].weight.device.type == "cpu"


def test_assigning_data_replaces_the_values():
    layer = nn.Linear(2, 2).to("shadow")
    layer.weight.data = torch.full((3, 2), 4.0, device="shadow")
    assert layer.weight.tolist() == [[4.0, 4.0]] * 3
    assert layer.weight.shape == (3, 2)
    layer.weight.data.zero_()
    assert layer.weight.sum().item() == 0.0


def test_deep_copies_are_apart():
    model = _model().to("shadow")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[3].weight.add_(1.0)
    assert isinstance(twin[3].weight, nn.Parameter)
    assert twin[3].weight.device.type == "shadow"
    assert torch.allclose(twin[3].weight - 1.0, model[3].weight, atol=1e-6)


@pytest.mark.parametrize("place", [None, "cpu", "shadow"])
def test_state_dict_survives_a_safe_checkpoint(tmp_path, place):
    model = _model().to("shadow")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True, map_location=place)
    assert {t.device.type for t in loaded.values()} == {"cpu" if place == "cpu" else "shadow"}
    twin = _model()
    twin.load_state_dict(loaded)
    for name, value in twin.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].cpu())


def test_a_cpu_checkpoint_loads_onto_the_device(tmp_path):
    torch.save({"a": torch.ones(2), "b": [nn.Parameter(torch.zeros(3)), 4]}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True, map_location=torch.device("shadow"))
    assert loaded["a"].device.type == loaded["b"][0].device.type == "shadow"
    assert isinstance(loaded["b"][0], nn.Parameter)
    assert (loaded["a"].tolist(), loaded["b"][1]) == ([1.0, 1.0], 4)


def test_training_resumes_bit_for_bit(tmp_path):
    def fresh():
        torch.manual_seed(4)
        model = _model().to("shadow")
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = fresh()
    whole = [_step(model, optimizer, "shadow") for _ in range(8)]

    model, optimizer = fresh()
    first = [_step(model, optimizer, "shadow") for _ in range(3)]
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng_state()}
    torch.save(state, tmp_path / "state.pt")
    torch.manual_seed(99)
    model, optimizer = _model().to("shadow"), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    restore_rng(state["rng"])
    assert first + [_step(model, optimizer, "shadow") for _ in range(5)] == whole


def test_memory_counter_follows_living_tensors():
    gc.collect()
    before = torch.shadow.memory_allocated()
    torch.shadow.reset_peak_memory_stats()
    x = torch.zeros(1000, device="shadow")
    view = x[10:20]
    assert torch.shadow.memory_allocated() - before == 4000
    y = x + 1
    assert torch.shadow.max_memory_allocated() - before == 8000
    del y
    assert torch.shadow.memory_allocated() - before == 4000
    assert torch.shadow.max_memory_allocated() - before == 8000
    del x
    assert torch.shadow.memory_allocated() - before == 4000
    del view
    assert torch.shadow.memory_allocated() == before
    torch.shadow.reset_peak_memory_stats()
    assert torch.shadow.max_memory_allocated() == before


def test_memory_counter_sees_saved_activations():
    gc.collect()
    before = torch.shadow.memory_allocated()
    x = torch.zeros(1000, device="shadow", requires_grad=True)
    y = x.exp().exp()
    held = torch.shadow.memory_allocated() - before
    assert held == 3 * 4000
    y.sum().backward()
    del y
    assert torch.shadow.memory_allocated() - before == 2 * 4000


class TestAutocast:
    def test_products_run_in_bf16_and_softmax_in_float32(self):
        x, layer = torch.randn(4, 6).to("shadow"), nn.Linear(6, 6).to("shadow")
        with torch.autocast("shadow", dtype=torch.bfloat16):
            y = layer(x)
            assert y.dtype == torch.bfloat16
            assert (x @ x.T).dtype == torch.bfloat16
            assert y.softmax(-1).dtype == torch.float32
            assert F.layer_norm(y, (6,)).dtype == torch.float32
            assert y.exp().dtype == torch.float32
            assert torch.cat([y, x]).dtype == torch.float32
            assert F.cross_entropy(y, torch.zeros(4, dtype=torch.long, device="shadow")).dtype == torch.float32
            assert nn.GRU(6, 3).to("shadow")(x)[0].dtype == torch.bfloat16
            with torch.autocast("shadow", enabled=False):
                assert layer(x).dtype == torch.float32
        assert layer(x).dtype == torch.float32

    def test_values_equal_cpu_autocast(self):
        def program(device):
            block = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).to(device)
            x, y = torch.randn(5, 6).to(device), torch.tensor([0, 1, 2, 0, 1], device=device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                out = block(x)
            loss = F.cross_entropy(out.float(), y)
            loss.backward()
            return [out, loss, block[0].weight.grad]

        assert_equal_runs(program, rtol=2e-2, atol=1e-2)

    def test_probabilities_are_banned_as_on_cuda(self):
        p = torch.full((2,), 0.5, device="shadow")
        with pytest.raises(RuntimeError, match="unsafe to autocast"), torch.autocast("shadow", dtype=torch.bfloat16):
            F.binary_cross_entropy(p, p)

    def test_gradients_arrive_in_the_weights_dtype(self):
        layer = nn.Linear(4, 4).to("shadow")
        with torch.autocast("shadow", dtype=torch.bfloat16):
            layer(torch.ones(2, 4, device="shadow")).float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32
        assert layer.weight.grad.device.type == "shadow"
