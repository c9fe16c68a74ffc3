"""Sessions of ratings, the split that leaves the last one out, and the token sequences a model reads.

A session ends where a user pauses for more than a minute. Its items rated 4 or 5 are its positives, the others its
observed negatives. The last session with a positive is the test session of a user, the last but one validation, and
everything before is training. Rows are rows of the canonical order, in which a session is a range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from auto_research.data.interactions import Interactions
from auto_research.data.prefix import LIKE_RATING, log2_bucket
from auto_research.data.sequences import fixed_user_order, head_items
from auto_research.runtime.errors import ConfigError

GAP_SECONDS = 60
CHUNK_ITEMS = 7
MIN_SESSIONS = 3
UNITS = ("session", "item", "chunk")
NO_GAP, GAP_BUCKETS = 0, 33  # 1 + log2 bucket; 0 for a user's very first event


def session_numbers(user: np.ndarray, timestamp: np.ndarray, gap: int = GAP_SECONDS) -> np.ndarray:
    """int64[N] ascending number of each row's session: a new one where the user changes or pauses more than `gap` s."""
    fresh = np.ones(len(user), dtype=bool)
    fresh[1:] = (user[1:] != user[:-1]) | (np.diff(timestamp) > gap)
    return np.cumsum(fresh) - 1


def chunk_numbers(user: np.ndarray, size: int = CHUNK_ITEMS) -> np.ndarray:
    """int64[N] number of each row's chunk: `size` consecutive events of a user, whatever their times."""
    fresh = np.ones(len(user), dtype=bool)
    fresh[1:] = user[1:] != user[:-1]
    first = np.maximum.accumulate(np.where(fresh, np.arange(len(user)), 0))
    return np.cumsum((np.arange(len(user)) - first) % size == 0) - 1


@dataclass(frozen=True)
class SessionSplit:
    """U users with at least three sessions that hold a positive.

    users: int64[U] ids.  first: int64[U] a user's first row.  valid, test: int64[U, 2] rows [start, stop) of the two
    target sessions. Training may read rows [first, valid start).
    """

    interactions: Interactions
    users: np.ndarray
    first: np.ndarray
    valid: np.ndarray
    test: np.ndarray

    @classmethod
    def build(cls, data: Interactions, gap: int = GAP_SECONDS) -> SessionSplit:
        """Split canonical interactions by sessions of `gap` seconds."""
        session = session_numbers(data.user, data.timestamp, gap)
        start = np.searchsorted(session, np.arange(int(session[-1]) + 2))
        rich = np.flatnonzero(np.bincount(session, weights=data.rating >= LIKE_RATING) > 0)
        owner = data.user[start[rich]].astype(np.int64)
        users, count = np.unique(owner, return_counts=True)
        last = np.cumsum(count) - 1
        keep = count >= MIN_SESSIONS
        users, last = users[keep], last[keep]
        bounds = np.stack([start[:-1], start[1:]], axis=1)
        first = data.user_starts()[users]
        return cls(data, users, first, bounds[rich[last - 1]], bounds[rich[last]])

    def __len__(self) -> int:
        return len(self.users)

    @property
    def n_items(self) -> int:
        return self.interactions.n_items

    def target(self, split: str) -> np.ndarray:
        """int64[U, 2] rows of the target session of 'valid' or 'test'."""
        if split not in ("valid", "test"):
            raise ConfigError(f"unknown split '{split}'; known: valid, test")
        return self.valid if split == "valid" else self.test

    def restrict(self, users: int) -> SessionSplit:
        """The first `users` of a fixed shuffle of the users."""
        if users >= len(self):
            return self
        order = fixed_user_order(self.interactions.dataset, self.interactions.n_users)
        keep = np.isin(self.users, order[np.isin(order, self.users)][:users])
        return SessionSplit(self.interactions, self.users[keep], self.first[keep], self.valid[keep], self.test[keep])

    @cached_property
    def train_rows(self) -> np.ndarray:
        """int64: all rows before the validation sessions."""
        return ranges(self.first, self.valid[:, 0])[0]

    def popularity(self, positive: bool = False) -> np.ndarray:
        """int64[n_items + 1] train events (positive ones only) of every item."""
        data = self.interactions
        rows = self.train_rows
        rows = rows[data.rating[rows] >= LIKE_RATING] if positive else rows
        return np.bincount(data.item[rows], minlength=data.n_items + 1).astype(np.int64)

    def head_items(self) -> np.ndarray:
        """Ids of the 10% most rated train items."""
        return head_items(self.popularity())

    def relevant(self, split: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Per user all positives and all negatives of the target session, int64 ids."""
        data = self.interactions
        found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for start, stop in self.target(split):
            liked = data.rating[start:stop] >= LIKE_RATING
            item = data.item[start:stop].astype(np.int64)
            found[0].append(item[liked])
            found[1].append(item[~liked])
        return found

    def seen(self, split: str, positions: np.ndarray) -> list[np.ndarray]:
        """Per user the items rated in earlier sessions: never candidates."""
        start = self.target(split)[:, 0]
        return [self.interactions.item[self.first[i] : start[i]].astype(np.int64) for i in positions]

    def counts(self) -> dict[str, int]:
        """Users, and sessions, positives and negatives by split."""
        data = self.interactions
        session = session_numbers(data.user, data.timestamp)
        rows = {"train": self.train_rows, "valid": ranges(*self.valid.T)[0], "test": ranges(*self.test.T)[0]}
        found = {"users": len(self)}
        for split, chosen in rows.items():
            liked = int((data.rating[chosen] >= LIKE_RATING).sum())
            found |= {f"{split}_sessions": len(np.unique(session[chosen]))}
            found |= {f"{split}_positives": liked, f"{split}_negatives": len(chosen) - liked}
        return found

    # What the contract tests ask of a split (tests/adapters/contract_edits.py, OwnSplit)

    def hidden(self, split: str) -> np.ndarray:
        """bool[N]: from the target session on, nothing of a user may reach a score of `split`."""
        ends = self.interactions.user_starts()[self.users + 1]
        return self._mark(self.target(split)[:, 0], ends)

    def tested(self) -> np.ndarray:
        """bool[N] rows that training and selection may not see."""
        return self.hidden("test")

    def fixed(self) -> np.ndarray:
        """bool[N] rows whose sign decides which sessions are targets: one positive of each, and poor sessions after."""
        data = self.interactions
        session = session_numbers(data.user, data.timestamp)
        liked = data.rating >= LIKE_RATING
        poor = np.bincount(session, weights=liked)[session] == 0
        fixed = poor & self.hidden("valid")
        for start, stop in np.concatenate([self.valid, self.test]):
            fixed[start + int(np.argmax(liked[start:stop]))] = True
        return fixed

    def edited(self, **columns: np.ndarray) -> SessionSplit:
        """The same split over other items or ratings."""
        return replace(self, interactions=self.interactions.edited(**columns))

    def _mark(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        marked = np.zeros(len(self.interactions), dtype=bool)
        marked[ranges(start, stop)[0]] = True
        return marked


def ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All integers of the ranges [start_i, stop_i) one after another, int64[n], and which range each is of."""
    size = stop - start
    owner = np.repeat(np.arange(len(size)), size)
    return np.arange(len(owner)) - np.repeat(np.cumsum(size) - size - start, size), owner


@dataclass(frozen=True)
class TokenRule:
    """How a history becomes tokens.

    unit: what one token is: a session, an item (each event its own token) or a chunk of `chunk` items.  targets: what
    a state predicts: the next 'session' (or chunk) from the state at the end of one, or the next positive 'item' from
    every state.  gap: seconds that end a session.  inputs: 'all' events or 'positive' ones.  events, tokens,
    token_items, targets_kept: newest events of the user, tokens, items of a token, positives (and negatives) of a target.
    """

    unit: str = "session"
    targets: str = "session"
    gap: int = GAP_SECONDS
    chunk: int = CHUNK_ITEMS
    inputs: str = "all"
    events: int = 200
    tokens: int = 50
    token_items: int = 20
    targets_kept: int = 20

    def __post_init__(self) -> None:
        if self.unit not in UNITS or self.targets not in ("session", "item") or self.inputs not in ("all", "positive"):
            raise ConfigError(f"unknown unit {self.unit!r}, targets {self.targets!r} or inputs {self.inputs!r}")

    @property
    def longest(self) -> int:
        """Most tokens of one user."""
        return self.events if self.unit == "item" else self.tokens


@dataclass(frozen=True)
class TokenSequences:
    """Histories of U users as tokens, flat: user u has tokens [token_start[u], token_start[u + 1]).

    item, positive: of E events, token_of int64[E] ascending.  gap: int64[N] bucket of the pause before each token.
    state: int64[R] token whose state predicts; pos, neg: int64[R, K] newest positives and negatives of its target, 0
    padded.  skip: all items of the targets, those of target r at [skip_start[r], skip_start[r + 1]).
    event_start, token_start, target_start: int64[U + 1].  skip_start: int64[R + 1].
    """

    item: np.ndarray
    positive: np.ndarray
    token_of: np.ndarray
    gap: np.ndarray
    state: np.ndarray
    pos: np.ndarray
    neg: np.ndarray
    skip: np.ndarray
    skip_start: np.ndarray
    event_start: np.ndarray
    token_start: np.ndarray
    target_start: np.ndarray

    def __len__(self) -> int:
        return len(self.token_start) - 1


def token_sequences(
    data: SessionSplit, rule: TokenRule, split: str, positions: np.ndarray | None = None, targets: bool = False
) -> TokenSequences:
    """Histories before the target session of 'valid' or 'test' of the users at `positions` (default: all).

    targets: also next-session targets inside the history, for training.
    """
    table = data.interactions
    positions = np.arange(len(data)) if positions is None else positions
    number = _unit_numbers(data, rule)
    gap = _pauses(table)
    parts = [
        _one(data, rule, number, gap, int(data.first[i]), int(data.target(split)[i, 0]), targets) for i in positions
    ]

    def join(name: str) -> np.ndarray:
        return np.concatenate([part[name] for part in parts])

    def starts(name: str) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([len(part[name]) for part in parts])]).astype(np.int64)

    tokens = starts("gap")
    shift = np.repeat(tokens[:-1], [len(part["rows"]) for part in parts])
    state_shift = np.repeat(tokens[:-1], [len(part["state"]) for part in parts])
    rows = join("rows")
    return TokenSequences(
        item=table.item[rows].astype(np.int64),
        positive=table.rating[rows] >= LIKE_RATING,
        token_of=join("token_of") + shift,
        gap=join("gap"),
        state=join("state") + state_shift,
        pos=join("pos"),
        neg=join("neg"),
        skip=join("skip"),
        skip_start=np.concatenate([[0], np.cumsum(join("skip_size"))]).astype(np.int64),
        event_start=starts("rows"),
        token_start=tokens,
        target_start=starts("state"),
    )


def _unit_numbers(data: SessionSplit, rule: TokenRule) -> np.ndarray:
    table = data.interactions
    if rule.unit == "chunk":
        return chunk_numbers(table.user, rule.chunk)
    return session_numbers(table.user, table.timestamp, rule.gap)


def _pauses(table: Interactions) -> np.ndarray:
    """int64[N] bucket of the seconds since the user's previous event."""
    pause = np.diff(table.timestamp, prepend=table.timestamp[:1])
    fresh = np.ones(len(pause), dtype=bool)
    fresh[1:] = table.user[1:] != table.user[:-1]
    return np.where(fresh, NO_GAP, 1 + log2_bucket(np.where(fresh, 0, pause)))


def _one(
    data: SessionSplit, rule: TokenRule, number: np.ndarray, gap: np.ndarray, first: int, stop: int, targets: bool
):
    """One user's history rows [first, stop) cut to the rule, its tokens and, for training, their targets."""
    table = data.interactions
    rows = np.arange(max(first, stop - rule.events), stop)
    opens = rows if rule.unit == "item" else _first_of(number[rows], rows)  # first row of every event's token
    if rule.unit != "item":
        kept = np.unique(opens)[-rule.tokens :]
        rows, opens = rows[opens >= kept[0]], opens[opens >= kept[0]]
        newest = _place_from_end(opens) < rule.token_items
    else:
        newest = np.ones(len(rows), dtype=bool)
    if rule.inputs == "positive":
        liked = newest & (table.rating[rows] >= LIKE_RATING)
        newest = liked if liked.any() else rows == rows[-1]  # every user has a token
    token_row, token_of = np.unique(opens[newest], return_inverse=True)
    part = {"rows": rows[newest], "token_of": token_of.astype(np.int64), "gap": gap[token_row]}
    return part | _targets(table, rule, number, rows, token_row if targets else token_row[:0])


def _first_of(group: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Per row the first kept row of its (ascending) group."""
    _, at, inverse = np.unique(group, return_index=True, return_inverse=True)
    return rows[at][inverse]


def _place_from_end(group: np.ndarray) -> np.ndarray:
    """Position of every element in its run of equal values, counted from the run's end."""
    stop = np.searchsorted(group, group, side="right")
    return stop - 1 - np.arange(len(group))


def _targets(table: Interactions, rule: TokenRule, number: np.ndarray, rows: np.ndarray, token_row: np.ndarray) -> dict:
    """Predicting tokens of one user and their target items."""
    liked, item = table.rating[rows] >= LIKE_RATING, table.item[rows].astype(np.int64)
    state, pos, neg, skip = [], [], [], []
    if rule.targets == "item":
        for token, row in enumerate(token_row):
            later = np.flatnonzero(liked & (rows > row))[:1]
            if len(later):
                state.append(token), pos.append(item[later]), neg.append(item[:0]), skip.append(item[later])
    else:
        units = number[rows]
        for unit in np.unique(units)[1:]:
            inside = units == unit
            before = int(np.searchsorted(token_row, rows[inside][0])) - 1
            if before >= 0 and liked[inside].any():
                state.append(before), pos.append(item[inside & liked]), neg.append(item[inside & ~liked])
                skip.append(item[inside])
    width = 1 if rule.targets == "item" else rule.targets_kept
    return {
        "state": np.array(state, dtype=np.int64),
        "pos": _padded(pos, width),
        "neg": _padded(neg, width),
        "skip": np.concatenate([item[:0], *skip]),
        "skip_size": np.array([len(items) for items in skip], dtype=np.int64),
    }


def _padded(lists: list[np.ndarray], width: int) -> np.ndarray:
    grid = np.zeros((len(lists), width), dtype=np.int64)
    for row, items in enumerate(lists):
        kept = items[-width:]
        grid[row, : len(kept)] = kept
    return grid
