"""Hostile input, made at random from what is valid: `make fuzz`, or `python -m tests.fuzz --help`.

A target is a module of this folder with two functions:

* `case(rng: random.Random) -> bytes` makes a case, a mutated valid input, from this generator and
  nothing else;
* `run(case: bytes) -> None` does with it what a user's call does. It returns, or raises an error of
  `headrace.errors`.

Anything else is a finding: another exception, a crash, a case that takes more than
`SECONDS_PER_CASE` of the processor or `PATIENCE` on the clock, or one that makes the process grow
by more than `MEMORY`; a target may set these three for itself. Case `i` of a run with `--seed S` is
the same on every machine. `corpus/TARGET/` has cases that once were findings, and a few that reach
far; each run of the target starts with them. A file named on the command line runs by itself:
`python -m tests.fuzz gguf --file .fuzz/gguf-17`.
"""
