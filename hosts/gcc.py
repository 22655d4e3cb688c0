"""gcc, its assembler and the linker on a large file."""

import hashlib

NEEDS = ["gcc"]


def functions(small):
    return 1_500 if small else 8_000


def ABOUT(small):
    return f"a file of {functions(small):,} functions, compiled, assembled and linked"


def prepare(dir, small):
    with open(f"{dir}/large.c", "w") as file:
        file.write("#include <stdio.h>\n")
        for n in range(functions(small)):
            file.write(f"""
                unsigned f{n}(unsigned a, unsigned b) {{
                    unsigned sum = {n}, list[16];
                    for (unsigned i = 0; i < 16; i++) list[i] = a * i + b + {n * 7919 % 1000};
                    for (unsigned i = 0; i < b; i++) sum = (sum << 3 ^ list[i % 16]) + (sum >> 7) % {n + 3};
                    switch (sum % 7) {{ case 0: return sum; case 1: return a; case 2: return b + {n}; default: break; }}
                    return sum ^ a;
                }}
            """)
        file.write("int main(void) { unsigned sum = 0;\n")
        file.writelines(f"sum = f{n}(sum, {n % 40});\n" for n in range(functions(small)))
        file.write('printf("%u\\n", sum); }\n')


def work(side, dir):
    side.run(["gcc", "-O1", "-o", "large", "large.c"], cwd=dir)
    with open(f"{dir}/large", "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
