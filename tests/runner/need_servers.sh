#!/bin/sh
# Installs what some tests start (tests/support/servers/installed.py): a PostgreSQL server, a Redis server, the browser that
# looks at the page with its driver, the load generator wrk, and iproute2. Only Debian and its children, as root, need no
# questions for that.
set -eu
has() { command -v "$1" >/dev/null 2>&1; }
missing=""
has initdb || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="postgresql"
has redis-server || missing="$missing redis-server"
{ has chromium && has chromedriver; } || missing="$missing chromium chromium-driver fonts-liberation"
has wrk || missing="$missing wrk"
has ip || missing="$missing iproute2"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! has apt-get; then
    echo "servers: expected Debian and root to install $missing; without them their tests are skipped" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -qq -y --no-install-recommends "$@" >/dev/null; }
# The servers' packages would start one for the whole machine, now and at every boot, unless these say otherwise.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
fi
no_cluster() { sed -ri 's/^#? *create_main_cluster *=.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf; }
no_boot() { ! has systemctl || ! has redis-server || systemctl disable --quiet redis-server; }
# shellcheck disable=SC2086  # several packages
if ! { apt-get update -qq && install postgresql-common && no_cluster && install $missing && no_boot; }; then
    echo "servers: $missing could not be installed; without them their tests are skipped" >&2
    exit 1
fi
