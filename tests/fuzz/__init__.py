"""Hostile input, made at random from valid input: `make fuzz`, or `python -m tests.fuzz
--help`.

A target is a module of this folder with two functions:

* `case(rng: random.Random) -> bytes` makes a case, a mutated valid input, from the
  generator only;
* `run(case: bytes) -> None` does with it whatever a user's call does. It returns, or
  raises an error of `headrace.errors`.

Any other result is a finding: another exception, a crash, a case over
`SECONDS_PER_CASE` of CPU time or `PATIENCE` on the clock, or growth of the process by
more than `MEMORY`. A target may set these limits for itself.

Case `i` of a run with `--seed S` is the same on every machine. `corpus/TARGET/` has
former findings, and some cases that reach far; each run of the target starts with them.
A file on the command line runs alone: `python -m tests.fuzz gguf --file .fuzz/gguf-17`.
"""
