# common.sh -- sourced by demo, test and test-with: from a bare Debian machine with Python and gcc to a built project.
#
# Everything is installed once; a second run only looks. Settings, from the environment:
#   PYTHON       the interpreter to make the virtual environment with (python3)
#   TORCH_INDEX  where pip finds PyTorch's CPU wheels, when its usual places do not have them

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH=2.13.0
DEEPSPEED=0.19.8
# NVIDIA's compiler of chains, what reads its machine code, and headers: tests of what a GPU would run, without one.
NVIDIA=(nvrtc==13.5.37 nvdisasm==13.5.37 cuobjdump==13.5.37 runtime==13.5.37 crt==13.5.37)
# An exact solver, which the planner of memory is compared with. (It asks for an older protobuf than it needs.)
SOLVER=(ortools==9.15.6755 absl-py==2.5.1 immutabledict==4.3.1 pandas==3.1.1)
# Opens the files that `save_as_onnx` writes. In a folder of its own: tests of our own onnxruntime names need it away.
RUNTIME=(onnxruntime==1.32.0 flatbuffers==25.12.19)
VENV=.venv
SYSTEM_PACKAGES=(protobuf-c-compiler libprotobuf-c-dev)
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules
APT_IS_FRESH=

say() { printf '\n== %s\n' "$*"; }
die() { printf '%s\n' "$*" >&2; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# Debian packages that are not there yet.
install_system() {
    local package missing=()
    for package in "$@"; do
        [ "$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null)" = "install ok installed" ] || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing Debian packages: ${missing[*]}"
    if [ -z "$APT_IS_FRESH" ]; then
        as_root timeout 300 apt-get update -qq
        APT_IS_FRESH=yes
    fi
    as_root env DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# Debian's own Python comes without what makes virtual environments and without its headers.
check_python() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "Python 3.11 or newer is needed (PYTHON=...)"
    command -v gcc >/dev/null || die "gcc is needed"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || install_system python3-venv
    "$PYTHON" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
        install_system python3-dev
}

# Of 18,000 files a few thousand are ever imported: each is compiled then.
pip_install() { timeout 900 "$VENV/bin/python" -m pip install -q --no-compile "$@"; }

# PyTorch first: what comes later must find this version, or pip would bring the newest with several GB of CUDA.
install_torch() {
    if nvidia-smi -L >/dev/null 2>&1; then
        pip_install "torch==$TORCH"
    else
        pip_install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$TORCH+cpu" ||
            die "pip finds no CPU build of PyTorch $TORCH; set TORCH_INDEX to PyTorch's index of CPU wheels"
    fi
}

# stamped NAME CONTENT COMMAND...: runs the command unless it has run with this content before.
stamped() {
    local stamp="$VENV/.stamp-$1" content="$2"
    shift 2
    [ "$(cat "$stamp" 2>/dev/null)" = "$content" ] && return 0
    "$@"
    echo "$content" >"$stamp"
}

hash_of() { find "$@" -type f ! -path '*/__pycache__/*' ! -name '*.so' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16; }

# All that a test may read, and what it runs in: Python, its packages (torch among them), the compiler.
hash_of_sources() {
    {
        hash_of csrc ortmodule optim tests examples benchmarks docs scripts .github setup.py pyproject.toml README.md \
            MANIFEST.in CONTRIBUTING.md CHANGELOG.md SECURITY.md .pre-commit-config.yaml
        "$VENV/bin/python" -VV
        "$VENV/bin/python" -m pip freeze --exclude-editable
        gcc --version
        grep -m 1 '^flags' /proc/cpuinfo
    } | sha256sum | cut -c1-16
}

# What a build needs is installed first: the engine is compiled while the rest is (what fails there is shown by
# install_project, which does it again).
install_python_packages() {
    local needed compiling
    say "installing Python packages into $VENV"
    needed=$(grep -E '^(numpy|onnx|setuptools|wheel)==' scripts/requirements.txt)
    # shellcheck disable=SC2086
    pip_install $needed
    "$VENV/bin/python" setup.py -q build_ext --inplace >/dev/null 2>&1 &
    compiling=$!
    install_torch
    pip_install -r scripts/requirements.txt
    # Without its compiled parts. Only tests/zero needs it, and is left out where it is not there.
    DS_BUILD_OPS=0 pip_install --no-build-isolation "deepspeed==$DEEPSPEED" ||
        say "DeepSpeed could not be installed: its tests are left out"
    pip_install --no-deps "${SOLVER[@]}" || say "OR-tools could not be installed: tests that compare with it are left out"
    pip_install --no-deps --target "$VENV/onnxruntime" --upgrade "${RUNTIME[@]}" ||
        say "onnxruntime could not be installed: the tests that open files with it are left out"
    # Large libraries that wrapped modules are used with, for the exhaustive form alone.
    [ -z "${LIBRARIES:-}" ] || install_libraries || say "these libraries could not be installed: their tests are left out"
    # torch's build for GPUs brings its own.
    "$VENV/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
        pip_install --no-deps "${NVIDIA[@]/#/nvidia-cuda-}" ||
        say "NVIDIA's packages could not be installed: tests that need them are left out"
    wait "$compiling" || true
}

# torchvision is that of torch's build: another cannot be imported, and with it neither can transformers' models.
install_libraries() {
    local torchvision build
    torchvision=$(grep '^torchvision==' scripts/requirements-libraries.txt)
    build=$("$VENV/bin/python" -c 'import torch; print("" if torch.version.cuda else "+cpu")')
    pip_install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torchvision$build" 2>/dev/null || true
    pip_install -r scripts/requirements-libraries.txt || return 1
    "$VENV/bin/python" -c 'import torchvision' 2>/dev/null || {
        "$VENV/bin/python" -m pip uninstall -q -y torchvision
        say "pip finds no torchvision for this build of PyTorch: tests with it are left out"
    }
}

install_project() {
    say "installing the project"
    pip_install -e . --no-build-isolation
    hash_of csrc >"$VENV/.stamp-csrc" # compiled just now
}

build_engine() {
    say "compiling the engine"
    "$VENV/bin/python" setup.py -q build_ext --inplace
}

setup() {
    PYTHON=${PYTHON:-python3}
    install_system "${SYSTEM_PACKAGES[@]}"
    if [ ! -x "$VENV/bin/python" ]; then
        check_python
        say "making a virtual environment in $VENV"
        "$PYTHON" -m venv "$VENV"
    fi
    stamped packages "$TORCH $DEEPSPEED ${NVIDIA[*]} ${SOLVER[*]} ${RUNTIME[*]} ${LIBRARIES:+$(hash_of scripts/requirements-libraries.txt)} $(hash_of scripts/requirements.txt docs/requirements.txt)" install_python_packages
    compgen -G 'ortmodule/_core*.so' >/dev/null || rm -f "$VENV"/.stamp-{project,csrc} # removed, by git clean for one
    stamped project "$(hash_of setup.py pyproject.toml)" install_project
    stamped csrc "$(hash_of csrc)" build_engine
}

# --- running tests ----------------------------------------------------------------------------------------------------

# counted WORD LINE: how many, in a line of counts.
counted() { [[ $2 =~ ([0-9]+)\ $1 ]] && echo "${BASH_REMATCH[1]}" || echo 0; }

# share_counts FILE STATUS: the counts in the last line of what a share has said. One that failed and ended without such a
# line, as when a sanitizer ends it, has an error.
share_counts() {
    tail -n 1 "$1" | grep -oE '[0-9]+ (passed|failed|errors?|skipped)' || [ "$2" = 0 ] || echo '1 error'
}

# in_shares COMMAND...: pytest in two processes, one from the first test on, one from the last one back, until they meet
# (tests/both_ends.py): the second says what it found when the first has ended. The last line counts both. OMP's threads
# wait asleep, or they would take each other's core. PRELOAD: LD_PRELOAD of pytest's processes alone.
in_shares() {
    local second_said first_said begun first=0 second=0
    local -x OMP_WAIT_POLICY=passive
    second_said=$(mktemp) first_said=$(mktemp) begun=$(mktemp)
    LD_PRELOAD="${PRELOAD:-}" "$@" --from-back "$begun" >"$second_said" 2>&1 &
    LD_PRELOAD="${PRELOAD:-}" "$@" --from-front "$begun" 2>&1 | tee "$first_said" || first=$?
    wait $! || second=$?
    cat "$second_said"
    { share_counts "$first_said" $first && share_counts "$second_said" $second; } |
        awk '{sub("errors", "error"); n[$2] += $1} END {for (w in n) printf "%s%d %s", s++ ? ", " : "", n[w], w; print ""}'
    rm "$first_said" "$second_said" "$begun"
    return $((first ? first : second))
}
export -f in_shares share_counts
