#!/bin/sh
# The server that tests/integration/test_postgres_store.py starts. Installed only where that needs no questions: on
# Debian and its children, as root. Elsewhere those tests say why they are skipped.
set -eu
command -v initdb >/dev/null 2>&1 && exit 0
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "tests: no PostgreSQL server here and no right to install one; its tests will be skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -qq -y --no-install-recommends "$1" >/dev/null; }
# The server's package would set up and start one for the whole machine, unless this file says otherwise.
no_cluster() { sed -ri 's/^#? *create_main_cluster *=.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf; }
if ! { apt-get update -qq && install postgresql-common && no_cluster && install postgresql; }; then
    echo "tests: PostgreSQL could not be installed; its tests will be skipped" >&2
fi
