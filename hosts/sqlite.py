"""sqlite3 with a table and an index in memory."""

NEEDS = ["sqlite3"]


def rows(small):
    return 500_000 if small else 1_500_000


def ABOUT(small):
    return f"`:memory:`, {rows(small):,} rows and an index, two queries"


def prepare(dir, small):
    with open(f"{dir}/load.sql", "w") as file:
        file.write(f"""
            create table t(a integer primary key, b text);
            with recursive c(x) as (select 1 union all select x + 1 from c where x < {rows(small)})
                insert into t select x, hex(x * 7919) || '-' || x from c;
            create index i on t(b);
            select count(*), sum(length(b)), min(b), max(b) from t;
            select sum(a) from t where b > '5';
        """)


def work(side, dir):
    with open(f"{dir}/load.sql") as load, open(f"{dir}/answer", "w") as answer:
        side.run(["sqlite3", ":memory:"], stdin=load, stdout=answer)
    with open(f"{dir}/answer") as answer:
        return answer.read()
