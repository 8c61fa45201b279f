//! The keeper: a detached shell that ends a server once nobody holds its lock. The script tells how.

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use crate::program::cannot_start;

pub(crate) const SCRIPT: &str = include_str!("keeper.sh");

/// Opens a lock file, made when it is not there. It is never replaced: two processes would lock two files.
pub(crate) fn lock_file(path: &Path) -> File {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .unwrap_or_else(|error| panic!("open the lock {}: {error}", path.display()))
}

/// Takes part in the use of a server until the file is dropped, or its process ends.
pub(crate) fn hold(path: &Path) -> File {
    let lock = lock_file(path);
    lock.lock_shared().expect("the lock of a server's users can be taken");
    lock.set_modified(SystemTime::now()).expect("the lock of a server's users can be touched");
    lock
}

/// Starts a keeper of the server whose first process is named in `pid_file` and whose files are in `folder`.
///
/// `presence` becomes its standard input, and with it a lock that shows that it lives.
pub(crate) fn start(lock: &Path, idle: Duration, folder: &Path, pid_file: &Path, presence: impl Into<Stdio>) {
    let mut command = Command::new("setsid");
    // Forked away, it is nobody's child here and no test runner waits for it.
    command.args(["--fork", "bash", "-c", SCRIPT, "steadfast-keeper"]);
    command.arg(lock).arg(idle.as_secs().to_string()).arg(folder).arg(pid_file);
    command.current_dir("/").stdin(presence).stdout(Stdio::null()).stderr(Stdio::null());
    let status = command.status().unwrap_or_else(|error| panic!("{}", cannot_start("setsid".as_ref(), &error)));
    assert!(status.success(), "start a keeper: {status}");
}
