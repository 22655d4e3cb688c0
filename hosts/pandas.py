"""CPython with NumPy and pandas: a table is grouped, joined and sorted."""

import pythons

NEEDS = []
TEXT = """
import sys
import numpy as np
import pandas as pd
count = int(sys.argv[1])
draw = np.random.default_rng(1)
sales = pd.DataFrame({
    'item': draw.integers(0, count // 50, count),
    'price': draw.integers(1, 1000, count),
    'word': np.char.add('word ', draw.integers(0, 5000, count).astype(str)),
})
items = pd.DataFrame({'item': np.arange(count // 50), 'weight': draw.integers(1, 100, count // 50)})
joined = sales.merge(items, on='item')
joined['load'] = joined.price * joined.weight
by_word = joined.groupby('word').load.sum().sort_values()
ordered = joined.sort_values(['load', 'item', 'price']).reset_index(drop=True)
print(len(joined), by_word.index[0], by_word.iloc[-1], (ordered.load * (ordered.index % 97)).sum())
"""

size = 0
python = None


def MISSING():
    """What is not there; the interpreter that has it is remembered."""
    global python
    python = pythons.with_packages("numpy", "pandas")
    return None if python else "pandas is not installed"


def rows(small):
    return 300_000 if small else 1_500_000


def ABOUT(small):
    return f"NumPy and pandas: {rows(small):,} rows joined, grouped and sorted"


def prepare(dir, small):
    global size
    size = rows(small)


def work(side, dir):
    return pythons.answer(side, dir, python, TEXT, size)
