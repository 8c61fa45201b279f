//! Real PostgreSQL for tests.
//!
//! ```text
//! shared()           one cluster for all test processes of a user, fast and forgetful: a test takes a schema of it
//! Cluster::start     a cluster of one test, as durable as a real one: to be stopped, killed, paused, failed over
//! Bouncer::start     PgBouncer in transaction mode before a cluster
//! Authority::named   certificates for Cluster::serve_tls
//! Proxy::start       a TCP proxy before a cluster: cuts connections, stalls, loses the answers to commits
//! on_each_database!  a test of each scenario on each database, PostgreSQL and SQLite
//! ```
//!
//! # Ends
//!
//! Nothing stays behind. What a test owns ends when it is dropped, and when the process dies without a drop, a keeper
//! (`keeper.sh`) ends it: a detached shell that waits for a file lock which the process holds for its life. The same
//! script ends the shared cluster once nobody has used it for a while.
//!
//! # Whose processes
//!
//! PostgreSQL and PgBouncer refuse to run as root. Started by root, they run as the user `postgres`, or `nobody` where
//! there is none.
//!
//! Everything here panics when it fails, with the tail of the server's log: a test has nothing better to do.

mod authority;
mod bouncer;
mod cluster;
mod database;
mod keeper;
mod program;
mod proxy;
mod server;
mod shared;
mod wire;

pub use authority::{Authority, Identity};
pub use bouncer::Bouncer;
pub use cluster::{Cluster, Mode};
pub use database::Database;
pub use program::psql;
pub use proxy::{Cut, Proxy};
pub use shared::{Shared, shared, shared_in};

/// The superuser of every cluster made here; nobody asks for a password.
pub const ROLE: &str = "steadfast";

/// The URL of the database `postgres` behind a local port; `params` is what stands after the question mark.
pub(crate) fn url(port: u16, params: &str) -> String {
    let mark = if params.is_empty() { "" } else { "?" };
    format!("postgres://{ROLE}@127.0.0.1:{port}/postgres{mark}{params}")
}

/// The same behind the socket in a folder.
pub(crate) fn socket_url(folder: &std::path::Path, port: u16, params: &str) -> String {
    let and = if params.is_empty() { "" } else { "&" };
    let folder = folder.display().to_string().replace('/', "%2F");
    format!("postgres://{ROLE}@{folder}:{port}/postgres?{and}{params}")
}
