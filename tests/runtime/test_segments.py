"""When gradients are handed over while backward goes on, in which segments, and what memory they take."""

import weakref

import torch

from ortmodule import explain
from ortmodule.engine import memory_goal
from ortmodule.runtime import grad_buckets, segments
from tests.runtime.test_grad_buckets import (
    DEPTH,
    WIDTH,
    Stack,
    assert_same,
    explain_graph,
    grads,
    name_of,
    plans,
    small,  # noqa: F401  (a fixture)
    stack,
    wrapped,
)
from tests.twins import Doubled, rows

# --- when -------------------------------------------------------------------------------------------------------------


def test_only_where_hooks_wait(monkeypatch):
    """Without hooks it is one node; with a hook, or a process group, a chain; the setting beats both."""
    x = rows(5, WIDTH)
    ours = wrapped(stack(), monkeypatch)
    assert name_of(ours(x)[0]) == "BridgeBackward"
    handle = ours.added.register_post_accumulate_grad_hook(lambda p: None)
    assert name_of(ours(x)[0]) == "FirstNodeBackward"
    handle.remove()
    assert name_of(ours(x)[0]) == "BridgeBackward"
    handle = ours.added.register_hook(lambda grad: None)
    assert name_of(ours(x)[0]) == "FirstNodeBackward"
    handle.remove()
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "is_initialized", lambda: True)
        assert name_of(ours(x)[0]) == "FirstNodeBackward"
    ours = wrapped(stack(), monkeypatch, "0")
    ours.added.register_hook(lambda grad: None)
    assert name_of(ours(x)[0]) == "BridgeBackward"
    assert name_of(wrapped(stack(), monkeypatch, "1")(x)[0]) == "FirstNodeBackward"


def test_hooks_that_come_later_are_seen(monkeypatch):
    x, ours = rows(5, WIDTH), wrapped(stack(), monkeypatch)
    for _ in range(grad_buckets.FIRST_LOOKS + 1):
        ours(x)
    ours.added.register_hook(lambda grad: None)
    assert "FirstNodeBackward" in [name_of(ours(x)[0]) for _ in range(grad_buckets.LOOKS)]


def test_where_gradients_are_added_to_earlier_ones(monkeypatch):
    """As in accumulation over micro-batches: not in a step that makes them anew."""
    x, ours = rows(5, WIDTH), wrapped(stack(), monkeypatch)
    for _ in range(2):
        loss = ours(x)[0]
        assert name_of(loss) == "BridgeBackward"
        loss.backward()
        assert name_of(ours(x)[0]) == "FirstNodeBackward"
        ours.zero_grad()


def test_few_gradients_are_one_segment(monkeypatch):
    monkeypatch.setattr(memory_goal, "SEGMENT_BYTES", 25 << 20)
    ours = wrapped(stack(), monkeypatch)
    ours.added.register_hook(lambda grad: None)
    assert name_of(ours(rows(5, WIDTH))[0]) == "BridgeBackward"


def test_segments_are_about_equal_and_cover_backward(monkeypatch):
    ours = wrapped(stack(tied=False), monkeypatch)
    ours.added.register_hook(lambda grad: None)
    ours(rows(5, WIDTH))
    graph = explain_graph(ours)
    (prepared,) = plans(ours)
    parts, plan = prepared.segments, prepared.plan
    assert len(parts) > 4
    assert [parts[0].first, parts[-1].last] == [plan.nodes[0], sum(plan.nodes)]
    assert all(a.last == b.first for a, b in zip(parts, parts[1:], strict=False))
    assert sorted(k for part in parts for k in part.leaves) == list(range(len(graph.leaves)))
    tensors = [rows(5, WIDTH) if isinstance(feed, int) else feed.get() for feed in graph.feeds]
    sizes = [sum(4 * tensors[graph.leaves[k]].numel() for k in p.leaves) for p in parts]
    assert max(sizes) < 3 * memory_goal.SEGMENT_BYTES and min(sizes[:-1]) >= memory_goal.SEGMENT_BYTES
    monkeypatch.setattr(memory_goal, "MOST_SEGMENTS", 2)
    assert 2 <= len(segments.segments_of(plan, graph.leaves, each=False)) <= 3
    assert len(segments.segments_of(plan, graph.leaves, each=True)) > len(parts)


def test_a_node_of_pytorchs_keeps_it_in_one(monkeypatch):
    class Net(Stack):
        def forward(self, x):
            return super().forward(Doubled.apply(self.layers[0](x)))

    torch.manual_seed(0)
    ours = wrapped(Net(), monkeypatch, "1")
    assert name_of(ours(rows(5, WIDTH))[0]) == "BridgeBackward"
    assert explain(ours).captured


# --- that it overlaps -------------------------------------------------------------------------------------------------


def test_hooks_are_called_while_the_engine_has_more_to_do(monkeypatch):
    """When the last layer's hook is called, the instructions of the first layer's gradient have not run."""
    x, ours = rows(5, WIDTH), wrapped(stack(tied=False), monkeypatch)
    seen = {}

    def hook(name):
        def called(parameter):
            times = [seconds for _, _, part, seconds, _ in plan.code() if part == "backward"]
            seen[name] = sum(seconds > 0 for seconds in times)
            assert all(seconds == 0 for seconds in times[seen[name] :])

        return called

    for name, parameter in ours.named_parameters():
        parameter.register_post_accumulate_grad_hook(hook(name))
    ours(x)
    plan = plans(ours)[-1].plan
    plan.profile(True)
    loss = ours(x)[0]
    plan.profile(False)
    plan.profile(True)  # from zero
    loss.backward()
    counts = [seen[f"layers.{i}.weight"] for i in reversed(range(DEPTH))]
    assert counts == sorted(set(counts)) and counts[-1] <= plan.nodes[1]
    assert counts[0] < plan.nodes[1] / 3


def test_gradients_are_not_copied(monkeypatch):
    """What the engine has computed becomes `.grad` as it is."""
    ours, made = wrapped(stack(), monkeypatch, "1"), {}

    class Spy(grad_buckets.Backward):
        def run(self, *args):
            super().run(*args)
            made.update({i: grad.data_ptr() for i, grad in enumerate(self.grads) if grad is not None})

    monkeypatch.setattr(grad_buckets, "Backward", Spy)
    ours(rows(5, WIDTH))[0].backward()
    graph, places = explain_graph(ours), set(made.values())
    assert len(places) == len(graph.leaves)
    assert {p.grad.data_ptr() for p in ours.parameters() if p.grad is not None} == places


def gradients_alive(monkeypatch):
    """A list that gets, with each segment, how many of the gradients are alive that the engine has made so far."""
    made, alive = {}, []

    class Spy(grad_buckets.Backward):
        def run(self, *args):
            super().run(*args)
            made.update({id(grad): weakref.ref(grad) for grad in self.grads if grad is not None})
            alive.append(sum(known() is not None for known in made.values()))

    monkeypatch.setattr(grad_buckets, "Backward", Spy)
    return alive


def test_memory_of_gradients_comes_with_their_segment(monkeypatch):
    """Gradients that a hook takes away are gone when the next ones are made."""
    ours, most = wrapped(stack(tied=False), monkeypatch, "1"), gradients_alive(monkeypatch)
    for parameter in ours.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    ours(rows(5, WIDTH))[0].backward()
    assert max(most) <= 4 < len(list(ours.parameters()))


def test_a_gradient_is_added_before_the_next_are_made(monkeypatch):
    """So micro-batches do not take the memory of all gradients twice; the sums have the same bits."""
    ours, most = wrapped(stack(tied=False), monkeypatch), gradients_alive(monkeypatch)
    other = wrapped(stack(tied=False), monkeypatch, "0")
    for seed in range(3):
        for module in ours, other:
            module(rows(5, WIDTH, seed=seed))[0].backward()
    assert_same(grads(ours), grads(other))
    assert 0 < max(most) <= 6 < len(list(ours.parameters())) / 3
