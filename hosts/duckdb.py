"""DuckDB in memory, by its Python package: a join, a group-by and a sort."""

import pythons

NEEDS = []
# Two threads and no files of its own: what does not fit is this limit's to place. What takes longer than 2 s has a
# progress bar, which is no answer.
TEXT = """
import sys
import duckdb
count = int(sys.argv[1])
db = duckdb.connect(':memory:', config={'threads': 2, 'temp_directory': '', 'memory_limit': '8GB'})
db.execute("set enable_progress_bar = false")
db.execute(f"create table sales as select (n * 7919) % {count // 20} as item, n % 1000 as price,"
           f" md5(n::varchar) as name from range({count}) t(n)")
db.execute(f"create table items as select n as item, n % 97 as weight from range({count // 20}) t(n)")
print(db.execute("select count(*), sum(price * weight) from sales join items using (item)").fetchall())
print(db.execute("select count(*), max(best) from (select name, max(price) best from sales group by name)").fetchall())
print(db.execute("select sum(price * place) from (select price, row_number() over (order by name) % 1009 place"
                 " from sales)").fetchall())
"""

size = 0
python = None


def MISSING():
    """What is not there; the interpreter that has it is remembered."""
    global python
    python = pythons.with_packages("duckdb")
    return None if python else "duckdb is not installed (pip install duckdb)"


def rows(small):
    return 500_000 if small else 3_000_000


def ABOUT(small):
    return f"`:memory:`, {rows(small):,} rows joined, grouped and sorted by two threads"


def prepare(dir, small):
    global size
    size = rows(small)


def work(side, dir):
    return pythons.answer(side, dir, python, TEXT, size)
