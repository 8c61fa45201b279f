//! A cluster of one test.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

use crate::program::wait;
use crate::server::Server;
use crate::{Authority, Identity, keeper, socket_url, url};

/// How a server is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In good order: transactions are rolled back, everything is written, standbys have received it.
    Fast,
    /// At once: the next start recovers from the log.
    Immediate,
}

/// A cluster of one test, in a folder of its own; unless its settings say otherwise, as durable as PostgreSQL is.
///
/// Dropped, it ends at once and its folder is removed. When the process dies before that, a keeper does it.
#[derive(Debug)]
pub struct Cluster {
    // In this order: the folder is gone before the keeper has a look.
    server: Server,
    port: u16,
    _folder: TempDir,
    _user: File,
}

impl Cluster {
    /// Makes and starts a cluster with these settings, which are those of `postgresql.conf`.
    pub fn start(settings: &[(&str, &str)]) -> Self {
        Self::make(|server| server.init(settings))
    }

    fn make(init: impl FnOnce(&Server)) -> Self {
        let folder = tempfile::Builder::new().prefix("steadfast-pg-").tempdir().expect("a folder for tests");
        let server = Server::new(folder.path());
        let lock = folder.path().join("user");
        let user = keeper::hold(&lock);
        keeper::start(&lock, Duration::ZERO, folder.path(), &server.pid_file(), std::process::Stdio::null());
        // Whole before anything can fail, so that a failure ends what has been started.
        let mut cluster = Self { server, port: 0, _folder: folder, _user: user };
        init(&cluster.server);
        cluster.port = cluster.server.start_somewhere();
        cluster
    }

    /// The port on 127.0.0.1; it stays the same for the cluster's life.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of its database; `params` is what stands after the question mark, as in `schema=one`.
    pub fn url(&self, params: &str) -> String {
        url(self.port, params)
    }

    /// The same through its socket.
    pub fn socket_url(&self, params: &str) -> String {
        socket_url(self.folder(), self.port, params)
    }

    /// Where its files are.
    pub fn folder(&self) -> &Path {
        self.server.folder()
    }

    /// Everything the server has logged.
    pub fn log(&self) -> String {
        self.server.log()
    }

    /// Runs statements, each a query of its own, and returns their rows: one a line, the columns parted by `|`.
    #[track_caller]
    pub fn sql(&self, statements: &str) -> String {
        self.server.sql(self.port, statements)
    }

    /// Stops the server; connections end.
    pub fn stop(&self, mode: Mode) {
        self.server.stop(match mode {
            Mode::Fast => "fast",
            Mode::Immediate => "immediate",
        });
    }

    /// Starts a stopped or killed server on its port, and waits until it takes connections.
    pub fn start_again(&self) {
        self.server.start();
    }

    /// Kills every process of the server.
    pub fn kill(&self) {
        self.server.kill();
    }

    /// Stops the time of every process of the server: connections stay open and nothing answers.
    pub fn pause(&self) {
        self.server.pause();
    }

    /// Ends a pause.
    pub fn resume(&self) {
        self.server.resume();
    }

    /// Ends the connections of every client, as an administrator does; how many there were.
    pub fn terminate_backends(&self) -> usize {
        let ended = self.sql(
            "select count(*) filter (where pg_terminate_backend(pid)) from pg_stat_activity
             where backend_type = 'client backend' and pid <> pg_backend_pid()",
        );
        ended.parse().expect("a count is a number")
    }

    /// Serves TLS with this certificate from now on, and takes clients as these lines of `pg_hba.conf` say, whose
    /// certificates are from this authority. It restarts; who comes through the socket is let in as before.
    pub fn serve_tls(&self, identity: &Identity, clients: &Authority, hba: &str) {
        self.server.serve_tls(identity, clients, hba);
        self.stop(Mode::Fast);
        self.start_again();
    }

    /// A standby that follows this cluster and has caught up.
    ///
    /// When it is synchronous, every commit here waits for it from now on, also when it is gone. It takes the place of
    /// a synchronous standby made before.
    pub fn standby(&self, synchronous: bool) -> Self {
        // Known by its folder, because a port may be used twice.
        let mut name = String::new();
        let standby = Self::make(|server| {
            let folder =
                server.folder().file_name().and_then(|name| name.to_str()).expect("a folder of a test has a name");
            name = folder.replace(|letter: char| !letter.is_ascii_alphanumeric(), "_");
            server.init_standby(self.port, &name);
        });
        let mut expected = ("streaming", "async");
        if synchronous {
            expected.1 = "sync";
            self.sql(&format!("alter system set synchronous_standby_names = '\"{name}\"'; select pg_reload_conf()"));
        }
        let question = format!("select state, sync_state from pg_stat_replication where application_name = '{name}'");
        let expected = format!("{}|{}", expected.0, expected.1);
        let mut answer = String::new();
        let follows = wait(Duration::from_secs(60), || {
            answer = self.sql(&question);
            answer == expected
        });
        assert!(follows, "the standby is {answer:?} rather than {expected}\n{}", standby.log());
        standby
    }

    /// Makes a standby a primary, and waits until it is one.
    pub fn promote(&self) {
        self.server.promote();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.server.end();
    }
}
