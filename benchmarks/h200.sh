#!/bin/sh
# build | test | sanitize [TOOL ...] | time [ROW ...]: the CUDA backend on a bare machine with Python 3.11 or later, gcc, nvcc 13
# and an H200, without a network. Each takes under 10 minutes.
#
#   build     compiles in place
#   test      every test that uses a device, on the CUDA device
#   sanitize  every kernel on small shapes (tests marked sanitize) under compute-sanitizer's memcheck, racecheck, synccheck and
#             initcheck, or the tools named; with ALL=1 all kernel tests
#   time      benchmarks/cuda.py
#
# OUT: a directory for results.csv, which `benchmarks/cuda.py --merge` adds to the committed table. COMMIT: the commit under
# test, for a machine without git.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || true)}
processes=14 # of the sanitizer
seconds=${SECONDS_A_TOOL:-140}

need() {
    missing=$("$python" -c "
import importlib.util, sys
print(' '.join(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))" "$@")
    [ -z "$missing" ] || { echo "these Python packages are missing: $missing" >&2; exit 2; }
}

# record ROW VALUE UNIT: a line of results.csv
record() {
    [ -n "${OUT:-}" ] || return 0
    mkdir -p "$OUT"
    [ -f "$OUT/results.csv" ] || echo "device,date,commit,command,row,value,unit,must,aim" > "$OUT/results.csv"
    device=$("$python" -c "import llmpy; print(llmpy.devices()[1]['name'])")
    echo "$device,$(date +%F),$commit,benchmarks/h200.sh $command,$1,$2,\"$3\",," >> "$OUT/results.csv"
}

# sanitize TOOL: kernel tests in several processes, each under the tool
sanitize() {
    tool=$1
    command="sanitize $tool"
    selection=sanitize
    [ -z "${ALL:-}" ] || selection="not slow"
    logs=$(mktemp -d)
    begun=$(date +%s)
    for i in $(seq 0 $((processes - 1))); do
        timeout "$seconds" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 "$python" -m pytest -v \
            tests/kernels -k cuda -m "$selection" --shard "$i/$processes" --durations=3 > "$logs/$i" 2>&1 || echo "$?" > "$logs/$i.failed" &
    done
    wait
    errors=0
    late=0
    for i in $(seq 0 $((processes - 1))); do
        status=$(cat "$logs/$i.failed" 2>/dev/null || echo 0)
        if [ "$status" != 0 ] && [ "$status" != 5 ]; then
            if [ "$status" = 124 ]; then late=$((late + 1)); else errors=$((errors + 1)); fi
            echo "== $tool, process $i: exit status $status (124: not done in $seconds s)"
            grep "=====" "$logs/$i" | head -40
            tail -5 "$logs/$i"
        fi
    done
    grep -h "s call" "$logs"/* | sort -rn | head -8
    not_done=
    [ "$late" = 0 ] || not_done=", $late not done in $seconds s"
    echo "$tool: $errors of $processes processes failed$not_done; $(($(date +%s) - begun)) s"
    record "sanitize $tool${ALL:+ all}" "$errors" "of $processes processes with an error$not_done"
    [ "$errors$late" = 00 ]
}

# check ROW ARGUMENT ...: pytest on the device
check() {
    row=$1
    shift
    log=$(mktemp)
    "$python" -m pytest -q -rsf --tb=short "$@" > "$log" 2>&1 || failed=$?
    grep "^E  " "$log" | sort | uniq -c | sort -rn | head -20 # the distinct errors, with their counts
    grep -v -i benchmark "$log" | tail -60
    counts=$(tail -1 "$log" | grep -o '[0-9]* \(failed\|skipped\|error\)[a-z]*' | tr '\n' ' ')
    record "$row" "$(tail -1 "$log" | grep -o '[0-9]* passed' | cut -d' ' -f1)" "passed${counts:+, $counts}"
}

command="${1:-}"
case "$command" in
build)
    need setuptools
    begun=$(date +%s)
    LLMPY_CUDA=require LLMPY_WERROR=1 "$python" setup.py -q build_ext --inplace
    "$python" -c "import llmpy; print(llmpy.devices()[1])"
    record build "$(($(date +%s) - begun))" "s on $(nproc) cores"
    ;;
test)
    need numpy pytest ml_dtypes hypothesis tokenizers jinja2 tqdm safetensors torch transformers gguf llguidance jsonschema starlette msgspec
    export OMP_NUM_THREADS=1
    suites="tests/kernels tests/engine tests/models tests/api tests/distributed tests/e2e tests/rl"
    workers=$("$python" -c "import xdist; print('-n 12')" 2>/dev/null || true)
    # shellcheck disable=SC2086
    check test $workers -k cuda -m "not slow and not alone" --without-demo-model $suites
    check "test device" -m alone --without-demo-model $suites
    if "$python" -c "from llmpy import demo; exit(not (demo.cache_dir() / demo.NAME).exists())"; then
        check "test demo" -k cuda tests/models/test_demo_model.py tests/api/test_demo_model.py tests/e2e # each takes the whole device
    else
        echo "without the demo model: it is not on this machine"
    fi
    exit "${failed:-0}"
    ;;
sanitize)
    need numpy pytest ml_dtypes
    shift
    for tool in ${*:-memcheck racecheck synccheck initcheck}; do
        sanitize "$tool" || failed=1
    done
    exit "${failed:-0}"
    ;;
time)
    need numpy torch
    shift
    "$python" benchmarks/cuda.py "$@" ${OUT:+--out "$OUT"} --commit "$commit"
    ;;
*)
    echo "usage: benchmarks/h200.sh build|test|sanitize [TOOL ...]|time [ROW ...]" >&2
    exit 2
    ;;
esac
