#!/usr/bin/env bash
# Installs the daemon as a systemd service, or removes it; `make install-service` calls this.
#
#   install.sh install      repeat it for an upgrade; files that an administrator wrote are not changed
#   install.sh uninstall    keeps state, configuration and user, and prints where they are
#
# Variables, with their defaults:
#   PREFIX=/opt/reconciled      a virtual environment of its own, owned by root
#   BINDIR=/usr/local/bin       where the link to the command is made: a directory that systemd searches
#   UNITDIR=/etc/systemd/system SYSUSERSDIR=/etc/sysusers.d TMPFILESDIR=/etc/tmpfiles.d
#   CATALOGDIR=/usr/local/lib/systemd/catalog   SYSCONFDIR=/etc
#   PYTHON=/usr/bin/python3     3.11 or later, where the service's user can read it
#   WHEELS=                     a directory of wheels, for a machine without network
#   SYSTEMD=                    the systemd version to install for; default: the one of this machine
#   DESTDIR=                    for packagers: everything is installed below it, and nothing is run
set -euo pipefail
umask 022
cd "$(dirname "$0")/.."

PREFIX=${PREFIX:-/opt/reconciled}
BINDIR=${BINDIR:-/usr/local/bin}
UNITDIR=${UNITDIR:-/etc/systemd/system}
SYSUSERSDIR=${SYSUSERSDIR:-/etc/sysusers.d}
TMPFILESDIR=${TMPFILESDIR:-/etc/tmpfiles.d}
CATALOGDIR=${CATALOGDIR:-/usr/local/lib/systemd/catalog}
SYSCONFDIR=${SYSCONFDIR:-/etc}
PYTHON=${PYTHON:-/usr/bin/python3}
WHEELS=${WHEELS:-}
DESTDIR=${DESTDIR:-}
SYSTEMD=${SYSTEMD:-$(systemctl --version 2>/dev/null | awk 'NR == 1 { print $2 }' || true)}

UNITS=(reconciled.service reconciled@.service reconciled.socket reconciled.target)
PLACE=$DESTDIR$PREFIX
# This file marks an environment as ours: no other is ever overwritten or removed.
MARK=$PLACE/installed-by-reconciled

fail() { echo "install-service: $*" >&2; exit 1; }
managed() { [ -z "$DESTDIR" ] && [ -d /run/systemd/system ]; }
put() { install -D -m 0644 "systemd/$1" "$DESTDIR$2"; }

check() {
    [ -n "$DESTDIR" ] || [ "$(id -u)" = 0 ] || fail "only root may do that: sudo make $1"
    [[ $PREFIX = /?* ]] || fail "PREFIX=$PREFIX is no absolute path below /"
    if [ -e "$PLACE" ] && [ ! -e "$MARK" ] && [ -n "$(ls -A "$PLACE")" ]; then
        fail "$PLACE is there and not ours: move it away, or write PREFIX=DIRECTORY"
    fi
}

check_python() {
    local real
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "$PYTHON is no Python 3.11 or later: write PYTHON=/usr/bin/python3.11 or another one"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "the venv module of $PYTHON is missing: apt-get install python3-venv"
    real=$("$PYTHON" -c 'import os, sys; print(os.path.realpath(sys.executable))')
    # ProtectHome= and PrivateTmp= hide these from the service.
    case $real in /root/*|/home/*|/run/*|/tmp/*|/var/tmp/*)
        fail "the service cannot see $real: write PYTHON=/usr/bin/python3" ;;
    esac
}

# All packages are fetched before the environment is changed, so that a network failure leaves the
# old version intact. The build uses a copy, because the checkout may be read-only. The service's
# environment has no pip: a temporary environment installs into it.
install_program() {
    local work fetched version
    version="$(version_of) $PREFIX"
    if [ -e "$MARK" ] && [ "$(cat "$MARK")" = "$version" ]; then
        echo "This version is installed already."
        return
    fi
    work=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf -- '$work'" EXIT
    fetched=(--no-index --find-links "${WHEELS:-$work/wheels}")
    mkdir -p "$work/source"
    cp -r reconciled pyproject.toml README.md LICENSE "$work/source"
    find "$work/source" -name __pycache__ -prune -exec rm -rf -- {} +
    "$PYTHON" -m venv "$work/pip"
    pip() { "$work/pip/bin/python" -m pip --quiet --disable-pip-version-check --no-input "$@"; }
    [ -n "$WHEELS" ] || pip download --require-hashes --dest "$work/wheels" -r requirements/run.txt

    mkdir -p "$PLACE"
    : >"$MARK"
    "$PYTHON" -m venv --without-pip "$PLACE"
    pip --python "$PLACE/bin/python" install "${fetched[@]}" --require-hashes -r requirements/run.txt
    pip --python "$PLACE/bin/python" install --no-index --no-deps --no-build-isolation "$work/source"
    if [ -n "$DESTDIR" ]; then      # scripts contain the path of their interpreter
        sed -i "1s|^#!.*|#!$PREFIX/bin/python3|" "$PLACE/bin/reconciled"
    fi
    echo "$version" >"$MARK"        # last, so that an interrupted installation is repeated
}

# A digest of the program: the same version is not installed again under a running daemon.
version_of() {
    { find reconciled -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum
      sha256sum pyproject.toml requirements/run.txt
      "$PYTHON" -c 'import sys; print(sys.version)'; } | sha256sum | cut -d' ' -f1
}

# An unknown directive is a warning in the log at each reload, so the name of a drop-in with newer
# directives begins with the version it needs. Checked at each install, as systemd may be upgraded.
install_units() {
    local unit file name
    for unit in "${UNITS[@]}"; do put "$unit" "$UNITDIR/$unit"; done
    remove_newer
    for file in systemd/[0-9][0-9][0-9]-*.conf; do
        name=${file##*/}
        [ "${SYSTEMD%%[!0-9]*}" -ge "${name%%-*}" ] || continue
        for unit in reconciled.service reconciled@.service; do
            put "$name" "$UNITDIR/$unit.d/10-newer-$name"
        done
    done
    put reconciled.sysusers.conf "$SYSUSERSDIR/reconciled.conf"
    put reconciled.tmpfiles.conf "$TMPFILESDIR/reconciled.conf"
    if [ -e systemd/reconciled.catalog ]; then put reconciled.catalog "$CATALOGDIR/reconciled.catalog"; fi
}

remove_newer() {
    rm -f -- "$DESTDIR$UNITDIR"/reconciled{,@}.service.d/10-newer-*.conf
    rmdir -- "$DESTDIR$UNITDIR"/reconciled{,@}.service.d 2>/dev/null || true
}

install_configuration() {
    local target=$DESTDIR$SYSCONFDIR/reconciled/reconciled.yaml
    [ ! -e "$target" ] || return 0
    put reconciled.yaml "$SYSCONFDIR/reconciled/reconciled.yaml"
    chmod 0640 "$target"    # tmpfiles.d sets its group
}

install_service() {
    [ -n "$SYSTEMD" ] || fail "which systemd? There is none here: write SYSTEMD=252 or another version"
    check install-service
    check_python
    install_program
    mkdir -p "$DESTDIR$BINDIR"
    ln -sfn "$PREFIX/bin/reconciled" "$DESTDIR$BINDIR/reconciled"
    install_units
    install_configuration
    [ -z "$DESTDIR" ] || { echo "Installed below $DESTDIR."; return; }
    systemd-sysusers "$SYSUSERSDIR/reconciled.conf"
    systemd-tmpfiles --create "$TMPFILESDIR/reconciled.conf"
    # Checks that the service's user can run it.
    setpriv --reuid=reconciled --regid=reconciled --clear-groups "$BINDIR/reconciled" --version
    ! managed || journalctl --update-catalog
    ! managed || systemctl daemon-reload
    echo "1. Declare the state:       $SYSCONFDIR/reconciled/reconciled.yaml and manifests in resources/"
    echo "2. Check it:                reconciled check && reconciled plan"
    if managed && systemctl --quiet is-active reconciled.service; then
        echo "3. Use this version:        systemctl restart reconciled"
    else
        echo "3. Start it, also at boot:  systemctl enable --now reconciled"
    fi
}

uninstall_service() {
    check uninstall-service
    if managed; then
        # Waits for critical operations, like every stop.
        systemctl disable --now reconciled.socket reconciled.target reconciled.service 2>/dev/null || true
        systemctl stop 'reconciled@*.service'
    fi
    local unit
    for unit in "${UNITS[@]}"; do rm -f -- "$DESTDIR$UNITDIR/$unit"; done
    rm -f -- "$DESTDIR$UNITDIR"/reconciled.target.wants/reconciled@*.service
    rmdir -- "$DESTDIR$UNITDIR/reconciled.target.wants" 2>/dev/null || true
    remove_newer
    rm -f -- "$DESTDIR$SYSUSERSDIR/reconciled.conf" "$DESTDIR$TMPFILESDIR/reconciled.conf" \
        "$DESTDIR$CATALOGDIR/reconciled.catalog"
    if [ "$(readlink "$DESTDIR$BINDIR/reconciled")" = "$PREFIX/bin/reconciled" ]; then
        rm -f -- "$DESTDIR$BINDIR/reconciled"
    fi
    if [ -e "$MARK" ]; then rm -rf -- "$PLACE"; fi
    ! managed || { systemctl daemon-reload; journalctl --update-catalog; }
    echo "The service is removed. These stay:"
    echo "  state          /var/lib/reconciled*, /var/cache/reconciled*, and the user reconciled"
    echo "  configuration  $SYSCONFDIR/reconciled*, drop-ins in $UNITDIR/reconciled*.d"
}

case ${1:-} in
    install)   install_service ;;
    uninstall) uninstall_service ;;
    *)         sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac
