#!/usr/bin/env bash
# Ends a server once nobody needs it any more, and removes its folder.
#
#   keeper.sh LOCK IDLE FOLDER PIDFILE
#
# Whoever needs the server holds a shared lock on LOCK, which ends with the holder however it dies. Whoever comes also
# touches LOCK, so that one who came and went while we slept is noticed. The server ends after IDLE seconds without
# anybody; from then until the folder is gone we hold the lock alone, so that nobody comes to a server that is ending.
#
# Standard input may carry a lock that says that a keeper is here. Our own children get neither lock: killed by hand, we
# would leave them behind for a while, and they would hold what we held.
set -u
lock=$1 idle=$2 folder=$3 pidfile=$4

# Nothing to lock: the owner is done already and has removed everything.
exec 9<"$lock" || exit 0

last_use() {
  stat -c %y -- "$lock" </dev/null 9<&- 2>/dev/null
}

unused() {
  local before
  flock -x 9 </dev/null || exit 1
  before=$(last_use)
  flock -u 9 </dev/null
  sleep "$idle" </dev/null 9<&-
  flock -n -x 9 </dev/null || return 1
  [ "$(last_use)" = "$before" ] || { flock -u 9 </dev/null; return 1; }
}

# The process in the pid file, unless that number belongs to somebody else by now; a dead one has no command line.
alive() {
  [[ $pid =~ ^[0-9]+$ ]] && tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" 9<&- | grep -qF -- "$folder" 9<&-
}

until unused; do :; done

pid=$(head -n 1 -- "$pidfile" 2>/dev/null </dev/null 9<&-)
if alive; then
  # A stopped one would not hear the second signal, which for PostgreSQL means to end at once and to take its children.
  kill -CONT "$pid"
  kill -QUIT "$pid"
  for _ in {1..100}; do
    alive || break
    sleep 0.1 </dev/null 9<&-
  done
  ! alive || kill -KILL "$pid"
fi
# Once more when a child was still writing.
rm -rf -- "$folder" </dev/null 9<&- || { sleep 1; rm -rf -- "$folder"; }
# In this order: who finds nobody holding LOCK must not take us for a keeper that stays.
exec 0<&-
exec 9<&-
