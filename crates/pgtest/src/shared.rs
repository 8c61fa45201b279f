//! The cluster that all test processes of a user share.
//!
//! Each test takes a schema of its own, so they do not meet, and none waits for a cluster to be made.
//!
//! # Files
//!
//! ```text
//! FOLDER/users      locked shared by whoever uses the cluster, alone by the keeper while it ends it
//! FOLDER/starter    locked by the one that looks whether the cluster runs, and starts it when it does not
//! FOLDER/keeper     locked by the keeper as long as it lives
//! FOLDER/cluster    the cluster, away as long as it does not run
//! ```
//!
//! # Races
//!
//! Processes that come together: the lock on `starter` lets one look and start at a time. One that comes while the
//! keeper ends the cluster: it waits for `users`, and finds nothing, and starts. One that comes before: its lock on
//! `users` keeps the keeper from ending anything.
//!
//! # Crashes
//!
//! Locks end with their processes, so no file left behind says anything. A killed keeper is noticed by the next that
//! comes, which starts another; a killed cluster too, and what is left of it is removed. A killed starter leaves a
//! keeper, because that is started first.

use std::fs::{self, File, Permissions};
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::program::{BINARIES, wait};
use crate::server::Server;
use crate::{keeper, url};

/// As long as this the cluster waits for the next test run: a developer's pause between two of them.
const IDLE: Duration = Duration::from_secs(20);

/// Nothing here outlives a crash of the machine, and nothing waits for a disk. Connections are for many processes.
const SETTINGS: &[(&str, &str)] = &[
    ("fsync", "off"),
    ("synchronous_commit", "off"),
    ("full_page_writes", "off"),
    ("autovacuum", "on"),
    ("max_connections", "400"),
];

/// The shared cluster in use: it runs at least until this is dropped.
#[derive(Debug)]
pub struct Shared {
    port: u16,
    _users: File,
}

/// The cluster that all test processes of this user share; started when it does not run.
pub fn shared() -> Shared {
    // Another checkout may want another cluster than we do, at the same time.
    let mut kind = DefaultHasher::new();
    (BINARIES.as_ref(), SETTINGS, keeper::SCRIPT).hash(&mut kind);
    let user = rustix::process::geteuid().as_raw();
    let folder = std::env::temp_dir().join(format!("steadfast-tests-{user}"));
    make_own(&folder);
    shared_in(&folder.join(format!("{:016x}", kind.finish())), IDLE)
}

/// A shared cluster apart from that of the user: whoever names this folder shares it, until nobody has for so long.
pub fn shared_in(folder: &Path, idle: Duration) -> Shared {
    make_own(folder);
    let starter = keeper::lock_file(&folder.join("starter"));
    starter.lock().expect("the starter's lock can be taken");
    let users = keeper::hold(&folder.join("users"));

    let cluster = folder.join("cluster");
    let presence = keeper::lock_file(&folder.join("keeper"));
    if presence.try_lock().is_ok() {
        // The keeper inherits the lock that we have just taken, so there is no moment in which nobody holds it.
        let pid_file = cluster.join("data").join("postmaster.pid");
        keeper::start(&folder.join("users"), idle, &cluster, &pid_file, presence);
    }
    Shared { port: running(cluster), _users: users }
}

/// The port of the cluster in this folder, which is made anew when it does not run.
fn running(folder: PathBuf) -> u16 {
    if folder.exists() {
        let server = Server::new(&folder);
        if server.answers() {
            return server.port().expect("a server that answers has a port");
        }
        server.end();
        // More than once, when a child whose server was killed is just about to notice.
        let removed = wait(Duration::from_secs(10), || fs::remove_dir_all(&folder).is_ok() || !folder.exists());
        assert!(removed, "remove what is left of a cluster in {}", folder.display());
    }
    fs::create_dir(&folder).expect("a folder for the cluster can be made");
    let server = Server::new(&folder);
    server.init(SETTINGS);
    server.start_somewhere()
}

/// A folder that is surely ours: everybody can make one of that name, and then put files of theirs into it.
fn make_own(folder: &Path) {
    fs::create_dir_all(folder).unwrap_or_else(|error| panic!("make {}: {error}", folder.display()));
    let found = fs::symlink_metadata(folder).expect("a folder just made is there");
    let ours = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
    assert!(ours, "{} belongs to somebody else", folder.display());
    // The server's user goes through it to its files.
    fs::set_permissions(folder, Permissions::from_mode(0o755)).expect("the permissions of our folder are ours to set");
}

impl Shared {
    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of a schema, which need not exist.
    pub fn url(&self, schema: &str) -> String {
        url(self.port, &format!("schema={schema}"))
    }

    /// The URL of a schema that nobody has used before.
    pub fn fresh_url(&self) -> String {
        // The standard library's seed is random, and nobody guesses these names.
        self.url(&format!("t{:016x}", RandomState::new().hash_one(std::process::id())))
    }
}
