# Functions for scripts/demo and scripts/test: a virtual environment on any Debian-like machine. To be sourced.

# Print the interpreter to use: $LLMGW_PYTHON, and no other when that is set; else the first of at least 3.11.
find_python() {
    local candidate
    if [ -n "${LLMGW_PYTHON:-}" ]; then
        if "$LLMGW_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$LLMGW_PYTHON"
            return 0
        fi
        echo "error: cannot use LLMGW_PYTHON=$LLMGW_PYTHON: it is no Python 3.11 or newer" >&2
        echo "  correct it or unset it" >&2
        return 1
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.14; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "error: cannot find Python 3.11 or newer on PATH" >&2
    echo "  install it (on Debian 12: sudo apt-get install python3), or set LLMGW_PYTHON to the path of one" >&2
    return 1
}

# Make the virtual environment $1 unless it is there; sets $venv. The system's own Python is never written to, so an
# externally managed one does not matter. Debian splits ensurepip off into python3-venv.
make_venv() {
    venv=$1
    if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    local python
    python=$(find_python) || return 1
    rm -rf "$venv"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        local version package
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        package="python$version-venv"
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
            echo "installing $package (this Python has no ensurepip)"
            apt-get update -qq || true
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null ||
                DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
        elif "$python" -m virtualenv --version >/dev/null 2>&1; then
            "$python" -m virtualenv -q "$venv"
            return 0
        else
            echo "error: cannot make a virtual environment: $(command -v "$python") has no ensurepip" >&2
            echo "  run: sudo apt-get install $package" >&2
            return 1
        fi
    fi
    "$python" -m venv "$venv"
}

# Install $1 (a requirement such as ".[dev]") as editable; quiet unless it fails.
install_into_venv() {
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -e "$1"
}
