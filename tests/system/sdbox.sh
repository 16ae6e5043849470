#!/bin/bash
# sdbox: a throw-away real systemd. It is PID 1 of its own namespaces and runs on a copy-on-write overlay of this
# machine's root file system. Boots in about 0.3 s; when stopped, no mount, cgroup or process is left.
# Needs root, a cgroup v2 mount (pure or hybrid), overlayfs, util-linux and the systemd package. Exit 77: cannot run here.
#   sdbox.sh start DIR          boot; DIR/share appears as /share inside, read-write; unit files go to DIR/share/units
#                               or, inside, to /etc/systemd/system
#   sdbox.sh exec  DIR CMD...   run CMD inside (systemctl, journalctl, curl --unix-socket ...)
#   sdbox.sh stop  DIR          clean power-off (units get their stop jobs), then everything is removed but DIR itself
# Environment of "start":
#   SDBOX_ROOT=DIR   another root file system instead of / (a debootstrap of another release: another systemd version)
#   SDBOX_BIND=A:B   more directories to bind read-write at the same path (/tmp and /run are fresh inside)
#   SDBOX_DBUS=1     also run a system D-Bus, which systemctl needs when it is not called by root
# Environment of "stop":
#   SDBOX_STOP_TICKS=N   wait N x 50 ms for the power-off before killing the rest (default 200)
set -euo pipefail
cmd=$1; dir=$(realpath -m "$2"); shift 2

alive() { [ -s "$dir/unshare.pid" ] && kill -0 "$(cat "$dir/unshare.pid")" 2>/dev/null; }
sweep() {   # end whatever is left in the box's cgroup, then remove the cgroup tree
  echo 1 >"$1/cgroup.kill" 2>/dev/null || true
  for ((i=0; i<40; i++)); do find "$1" -depth -type d -exec rmdir {} + 2>/dev/null && break; sleep 0.05; done
  if [ -d "$1" ]; then echo "sdbox: cannot remove $1" >&2; return 1; fi
}

case $cmd in
start)
  if alive; then echo "sdbox: $dir already runs" >&2; exit 1; fi
  [ "$(id -u)" = 0 ] || { echo "sdbox: needs root" >&2; exit 77; }
  [ -x /lib/systemd/systemd ] || [ -n "${SDBOX_ROOT:-}" ] || { echo "sdbox: systemd is not installed" >&2; exit 77; }
  cg2=$(findmnt -n -t cgroup2 -o TARGET | head -1)             # pure: /sys/fs/cgroup; hybrid: /sys/fs/cgroup/unified
  [ -n "$cg2" ] || { echo "sdbox: no cgroup2 mount" >&2; exit 77; }
  mkdir -p "$dir/ovl" "$dir/rootfs" "$dir/share/units"; rm -f "$dir/init.pid"
  cg=$cg2/sdbox-$$; mkdir "$cg"; echo "$cg" >"$dir/cgroup"
  bash -c 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"' _ "$cg" \
    setsid unshare --mount --pid --uts --ipc --net --cgroup --fork --kill-child --propagation private \
    bash "$(realpath "$0")" _init "$dir" >"$dir/console.log" 2>&1 </dev/null &
  un=$!; echo $un >"$dir/unshare.pid"
  for ((i=0; i<200; i++)); do
    p1=$(awk '{print $1}' "/proc/$un/task/$un/children" 2>/dev/null || true)
    if [ -n "$p1" ] && [ "$(nsenter -t "$p1" -m -p -- /bin/systemctl is-system-running 2>/dev/null || true)" = running ]; then
      echo $un >"$cg2/cgroup.procs"                            # no process may stay in the namespace's root cgroup
      echo "$p1" >"$dir/init.pid"; exit 0
    fi
    kill -0 $un 2>/dev/null || break
    sleep 0.05
  done
  echo "sdbox: systemd did not come up:" >&2; tail -40 "$dir/console.log" >&2
  kill -9 $un 2>/dev/null || true; sweep "$cg" || true; exit 1 ;;
exec)
  [ -s "$dir/init.pid" ] || { echo "sdbox: $dir does not run" >&2; exit 1; }
  exec nsenter -t "$(cat "$dir/init.pid")" -a -- "$@" ;;
stop)
  [ -s "$dir/unshare.pid" ] && [ -s "$dir/cgroup" ] || exit 0
  un=$(cat "$dir/unshare.pid"); cg=$(cat "$dir/cgroup")
  [ ! -s "$dir/init.pid" ] || kill -RTMIN+4 "$(cat "$dir/init.pid")" 2>/dev/null || true      # the same as systemctl poweroff
  for ((i=0; i<${SDBOX_STOP_TICKS:-200}; i++)); do kill -0 "$un" 2>/dev/null || break; sleep 0.05; done
  [ ! -d "$cg" ] || sweep "$cg"
  rm -f "$dir/init.pid" "$dir/unshare.pid" "$dir/cgroup" ;;
_init)
  r=$dir/rootfs; mount -t tmpfs tmpfs "$dir/ovl"; mkdir "$dir/ovl/u" "$dir/ovl/w"
  mount -t overlay overlay -o "lowerdir=${SDBOX_ROOT:-/},upperdir=$dir/ovl/u,workdir=$dir/ovl/w" "$r"
  mount -t proc proc "$r/proc"; mount --bind "$r/proc/sys" "$r/proc/sys"; mount -o remount,bind,ro "$r/proc/sys"
  mount -t sysfs -o ro sysfs "$r/sys"; mount -t cgroup2 cgroup2 "$r/sys/fs/cgroup"
  mount -t tmpfs -o mode=755 tmpfs "$r/dev"
  for d in null zero full random urandom tty; do touch "$r/dev/$d"; mount --bind "/dev/$d" "$r/dev/$d"; done
  mkdir "$r/dev/pts" "$r/dev/shm"; mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$r/dev/pts"; ln -s pts/ptmx "$r/dev/ptmx"
  ln -s /proc/self/fd "$r/dev/fd"; mount -t tmpfs -o mode=1777 tmpfs "$r/dev/shm"
  mount -t tmpfs -o mode=755 tmpfs "$r/run"; mount -t tmpfs -o mode=1777 tmpfs "$r/tmp"
  mkdir -p "$r/share"; mount --bind "$dir/share" "$r/share"
  IFS=:; for b in ${SDBOX_BIND:-}; do mkdir -p "$r$b"; mount --bind "$b" "$r$b"; done; unset IFS
  chmod o+x "$r/root" 2>/dev/null || true                      # overlay only: a User= unit can run a Python kept in root's home
  mkdir -p "$r/run/sdbox"
  want=; [ -z "${SDBOX_DBUS:-}" ] || want='Wants=dbus.socket dbus.service'
  printf '[Unit]\nDefaultDependencies=no\nAllowIsolate=yes\n%s\n' "$want" >"$r/run/sdbox/sdbox.target"
  printf '[Unit]\nDefaultDependencies=no\nConflicts=shutdown.target\n[Socket]\nListenStream=/run/dbus/system_bus_socket\n' >"$r/run/sdbox/dbus.socket"
  printf '%s\n' '[Unit]' DefaultDependencies=no Requires=dbus.socket Conflicts=shutdown.target '[Service]' Type=notify NotifyAccess=main \
    'ExecStart=/usr/bin/dbus-daemon --system --address=systemd: --nofork --nopidfile --systemd-activation --syslog-only' >"$r/run/sdbox/dbus.service"
  cd "$r"; mkdir -p .old; pivot_root . .old; umount -l /.old
  mount --make-rshared /                                       # a private root leaves LoadCredential= directories empty, without an error
  exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=sdbox SYSTEMD_LOG_TARGET=console \
    SYSTEMD_UNIT_PATH=/share/units:/etc/systemd/system:/run/systemd/system:/run/sdbox:/lib/systemd/system /lib/systemd/systemd --unit=sdbox.target ;;
*) echo "usage: sdbox.sh start|exec|stop DIR [CMD...]" >&2; exit 2 ;;
esac
