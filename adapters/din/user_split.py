"""The paper's MovieLens setting: users, not time, are split (switch `split: user`)."""

from dataclasses import replace

import numpy as np

from auto_research.data.request_index import HISTORY_ONLY
from auto_research.data.requests import SPLITS, RequestTable
from auto_research.data.sequences import fixed_user_order

TRAIN, VALID = 0.6, 0.1  # the remaining 30% of users are test; validation users come out of the training 70%


def split_by_user(table: RequestTable) -> RequestTable:
    """The same requests with whole users in train, valid and test, by a fixed shuffle of the table's users.

    Requests with fewer than five earlier ratings stay history. Train rows (popularity, negatives) are all rows of users
    outside validation and test.
    """
    chosen = np.concatenate([table.requests(name) for name in SPLITS])
    present = np.unique(table.request_user[chosen])
    order = fixed_user_order(table.interactions.dataset, table.interactions.n_users)
    order = order[np.isin(order, present)]
    bounds = np.round(np.cumsum([TRAIN, VALID]) * len(order)).astype(int)
    phase = np.full(table.interactions.n_users + 1, HISTORY_ONLY, dtype=np.int8)
    for code, users in enumerate(np.split(order, bounds)):
        phase[users] = code
    split = np.full(table.n_requests, HISTORY_ONLY, dtype=np.int8)
    split[chosen] = phase[table.request_user[chosen]]
    train_row = phase[table.interactions.user] <= 0  # train users, and users outside a restricted table
    return RequestTable(table.interactions, replace(table.index, split=split, train_row=train_row))
