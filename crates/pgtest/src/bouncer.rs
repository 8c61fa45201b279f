//! PgBouncer before a cluster.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::program::{as_server, cannot_start, free_port, give_to_server, wait};
use crate::{Cluster, Identity, ROLE, keeper, socket_url, url};

/// How often another port is tried when somebody was faster.
const PORTS_TRIED: usize = 5;

/// PgBouncer in transaction mode: a client has a connection of the server for one transaction at a time, and what it
/// set or prepared on it may be gone with the next.
///
/// Dropped, or when the process dies, it ends as a cluster does.
#[derive(Debug)]
pub struct Bouncer {
    child: Child,
    port: u16,
    folder: TempDir,
    _user: File,
}

impl Bouncer {
    /// Starts one before the PostgreSQL on this port of 127.0.0.1.
    pub fn start(port_of_postgres: u16) -> Self {
        Self::before("127.0.0.1", port_of_postgres, None)
    }

    /// The same, for clients that speak TLS and no others; it shows them this certificate.
    pub fn start_with_tls(port_of_postgres: u16, identity: &Identity) -> Self {
        Self::before("127.0.0.1", port_of_postgres, Some(identity))
    }

    /// Starts one that speaks with this cluster through its socket, so that no ports can be compared.
    pub fn start_by_socket(cluster: &Cluster) -> Self {
        Self::before(&cluster.folder().display().to_string(), cluster.port(), None)
    }

    fn before(host: &str, port_of_postgres: u16, tls: Option<&Identity>) -> Self {
        let folder = tempfile::Builder::new().prefix("steadfast-bouncer-").tempdir().expect("a folder for tests");
        give_to_server(folder.path());
        let file = |name: &str| folder.path().join(name);
        let lock = file("user");
        let user = keeper::hold(&lock);
        keeper::start(&lock, Duration::ZERO, folder.path(), &file("pid"), Stdio::null());
        // A list of those it knows; what passwords they have is not asked with `trust`.
        fs::write(file("users"), format!("\"{ROLE}\" \"\"\n")).expect("a list of users can be written");
        give_to_server(&file("users"));
        let mut settings = String::new();
        if let Some(identity) = tls {
            for (name, from) in [("cert", &identity.certificate), ("key", &identity.key)] {
                fs::copy(from, file(name)).expect("a certificate can be copied");
                give_to_server(&file(name));
            }
            let (key, cert) = (file("key"), file("cert"));
            settings = format!(
                "client_tls_sslmode = require\nclient_tls_key_file = {}\nclient_tls_cert_file = {}\n",
                key.display(),
                cert.display()
            );
        }
        for _ in 0..PORTS_TRIED {
            let port = free_port();
            let ini = ini(folder.path(), port, host, port_of_postgres) + &settings;
            fs::write(file("ini"), ini).expect("settings can be written");
            give_to_server(&file("ini"));
            let mut command = as_server(&program());
            // Not in the group of the test, so that a signal to the group leaves its end to the keeper.
            command.arg(file("ini")).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
            let spawned = command.spawn();
            let mut child = spawned.unwrap_or_else(|error| panic!("{}", cannot_start("pgbouncer".as_ref(), &error)));
            fs::write(file("pid"), child.id().to_string()).expect("a pid can be written");
            let (mut ended, mut log) = (None, String::new());
            let settled = wait(Duration::from_secs(60), || {
                ended = child.try_wait().expect("a child can be waited for");
                log = fs::read_to_string(file("log")).unwrap_or_default();
                // Its own word that it listens; a connection might reach somebody else on the port.
                ended.is_some() || log.contains("process up")
            });
            match ended {
                None if settled => return Self { child, port, folder, _user: user },
                None => drop((child.kill(), child.wait())),
                Some(_) if log.contains("Address already in use") => continue,
                Some(_) => {}
            }
            panic!("pgbouncer takes no connections: {ended:?}\n{log}");
        }
        panic!("none of {PORTS_TRIED} ports that were free stayed so");
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of the database behind it; `params` is what stands after the question mark.
    pub fn url(&self, params: &str) -> String {
        url(self.port, params)
    }

    /// The same through its socket.
    pub fn socket_url(&self, params: &str) -> String {
        socket_url(self.folder.path(), self.port, params)
    }
}

/// Debian puts it where only the administrator's PATH leads.
fn program() -> PathBuf {
    let debian = PathBuf::from("/usr/sbin/pgbouncer");
    if debian.exists() { debian } else { PathBuf::from("pgbouncer") }
}

/// Few connections to the server, so that clients do share them. A server that came back is noticed in a second, and
/// whoever waits for one that does not come back is told in ten.
fn ini(folder: &Path, port: u16, host: &str, port_of_postgres: u16) -> String {
    let folder = folder.display();
    format!(
        "[databases]
         * = host={host} port={port_of_postgres}
         [pgbouncer]
         listen_addr = 127.0.0.1
         listen_port = {port}
         unix_socket_dir = {folder}
         logfile = {folder}/log
         auth_type = trust
         auth_file = {folder}/users
         pool_mode = transaction
         default_pool_size = 5
         max_client_conn = 400
         server_login_retry = 1
         query_wait_timeout = 10
        "
    )
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
