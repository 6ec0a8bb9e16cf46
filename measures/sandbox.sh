# Runs a command in a sandbox made of util-linux: `sh sandbox.sh DIRECTORY DIRECTORY COMMAND...`
#
# The command gets its own processes, IPC and network (without loopback), a root directory in
# memory with the system and both directories, read-only, and 64 MB to write, also in memory. It
# holds no privileges and cannot get any. If a step fails, the command is not run.
set -e
umask 022                            # the command's user must be able to enter directories
if [ "$1" != inside ]; then
    # A caller who may change users, such as root, runs the command as a user of its own, whose
    # processes are counted. The ids are those that systemd reserves for such users. Any other
    # caller needs a user namespace, in which this one user exists.
    user="--reuid $((61184 + $$ % 4336)) --regid 65534 --clear-groups"
    setpriv $user true 2> /dev/null || user=
    # If memory runs out, Linux ends these processes first. They also end with their caller.
    echo 1000 > /proc/self/oom_score_adj
    exec setpriv --pdeathsig KILL unshare --net --ipc --pid --mount --fork --kill-child \
        $([ "$user" ] || echo --map-root-user) sh "$0" inside "$user" "$@"
fi
user=$2
shift 2
root=/sys/root                       # a place that the command does not need
mount -t tmpfs tmpfs /sys
mkdir $root
mount -t tmpfs -o size=1m,mode=755 tmpfs $root
for path in /usr /bin /lib /lib64 /etc "$1" "$2"; do
    if [ -d "$path" ] && [ ! -e "$root$path" ]; then
        mkdir -p "$root$path"
        mount --rbind "$path" "$root$path"
    fi
done
shift 2
mkdir -p $root/dev/shm
touch $root/dev/null $root/dev/urandom
# With another locale, findmnt escapes accents. Without an output of findmnt, mount gets an empty
# name and fails. A pipe would lose the status of findmnt.
places=$(LC_ALL=C.UTF-8 findmnt --list --noheadings --submounts --output TARGET $root)
while IFS= read -r place; do
    mount -o remount,bind,ro,nosuid,nodev none "$place"
done << END
$places
END
mount --bind /dev/null $root/dev/null
mount --bind /dev/urandom $root/dev/urandom
mount -t tmpfs -o size=64m,mode=1777,nosuid,nodev tmpfs $root/dev/shm
# After chroot, Linux refuses new user namespaces. This shell stays process 1, which the command
# cannot kill. When it ends, Linux ends all processes of the command.
HOME=/dev/shm TMPDIR=/dev/shm chroot $root setpriv $user --no-new-privs --bounding-set=-all \
    --inh-caps=-all --ambient-caps=-all "$@" || exit
