//! A PostgreSQL server in a folder: the part that the shared cluster and the clusters of one test have in common.
//!
//! ```text
//! FOLDER/data    the cluster
//! FOLDER/log     what the server says
//! ```
//!
//! All that is known of a running server stands in its `postmaster.pid`, so another process can take one over.

use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::authority::write_private;
use crate::program::{as_server, client, free_port, give_to_server, owner, run, wait};
use crate::{Authority, Identity, ROLE, socket_url, url};

/// How long a server may take for what takes moments, on a machine with other things to do.
const PATIENCE: Duration = Duration::from_secs(60);
const PATIENCE_SECONDS: &str = "60";

/// How often another port is tried when somebody was faster.
const PORTS_TRIED: usize = 5;

#[derive(Debug)]
pub(crate) struct Server {
    folder: PathBuf,
}

impl Server {
    /// In an existing folder, whose owner becomes whom the servers run as.
    pub(crate) fn new(folder: &Path) -> Self {
        give_to_server(folder);
        Self { folder: folder.to_owned() }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    pub(crate) fn pid_file(&self) -> PathBuf {
        self.data().join("postmaster.pid")
    }

    // --- making one ---------------------------------------------------------------------------------------------------

    /// A new cluster, with these settings.
    pub(crate) fn init(&self, settings: &[(&str, &str)]) {
        let mut command = owner("initdb");
        command.args(["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--username", ROLE, "--pgdata"]);
        self.must(run(command.arg(self.data())));
        // Shared memory in a file of the cluster: what a killed server leaves then goes with the folder.
        self.configure(&[("listen_addresses", "127.0.0.1"), ("dynamic_shared_memory_type", "mmap")]);
        // So much log stays for a standby that was away for a while.
        self.configure(&[("wal_keep_size", "256MB")]);
        self.configure(settings);
    }

    /// A copy of a running cluster, which follows it under this name.
    pub(crate) fn init_standby(&self, primary: u16, name: &str) {
        let mut command = owner("pg_basebackup");
        let source = url(primary, &format!("application_name={name}"));
        command.args(["-R", "-X", "stream", "-c", "fast", "--no-sync", "-d", &source, "-D"]);
        self.must(run(command.arg(self.data())));
        // In the file that wins: promoted, the copy waits for none of the standbys that its primary has.
        self.append("postgresql.auto.conf", &[("synchronous_standby_names", "")]);
    }

    /// Settings for the next start; the last word on a name counts.
    fn configure(&self, settings: &[(&str, &str)]) {
        self.append("postgresql.conf", settings);
    }

    fn append(&self, file: &str, settings: &[(&str, &str)]) {
        let mut text = String::new();
        for (name, value) in settings {
            writeln!(text, "{name} = '{}'", value.replace('\'', "''")).expect("a string takes text");
        }
        let file = OpenOptions::new().append(true).open(self.data().join(file));
        file.and_then(|mut file| file.write_all(text.as_bytes()))
            .expect("the settings of a new cluster can be written");
    }

    /// Certificates and rules for the next start.
    pub(crate) fn serve_tls(&self, identity: &Identity, clients: &Authority, hba: &str) {
        let files =
            [("server.crt", &identity.certificate), ("server.key", &identity.key), ("root.crt", &clients.root())];
        for (name, from) in files {
            self.write(name, &fs::read_to_string(from).expect("what was just made can be read"));
        }
        // Replication of standbys goes on as it was.
        self.write("pg_hba.conf", &format!("local all all trust\nhost replication all 127.0.0.1/32 trust\n{hba}\n"));
        self.configure(&[("ssl", "on"), ("ssl_ca_file", "root.crt")]);
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.data().join(name);
        write_private(&path, text);
        give_to_server(&path);
    }

    // --- its life -----------------------------------------------------------------------------------------------------

    /// Starts it on a free port of its choice and waits until it takes connections.
    pub(crate) fn start_somewhere(&self) -> u16 {
        let folder = self.folder.to_str().expect("the folder for temporary files has a readable name");
        for _ in 0..PORTS_TRIED {
            let port = free_port();
            self.configure(&[("port", &port.to_string()), ("unix_socket_directories", folder)]);
            match self.try_start() {
                Ok(()) => return port,
                Err(_) if self.log().contains("Address already in use") => {}
                failed => self.must(failed),
            }
        }
        panic!("none of {PORTS_TRIED} ports that were free stayed so\n{}", self.log_tail());
    }

    /// Starts it where it was and waits until it takes connections.
    pub(crate) fn start(&self) {
        self.must(self.try_start());
    }

    fn try_start(&self) -> Result<(), String> {
        let mut command = owner("pg_ctl");
        command.args(["start", "--wait", "--timeout", PATIENCE_SECONDS, "--silent", "--log"]);
        run(command.arg(self.log_file()).arg("--pgdata").arg(self.data())).map(drop)
    }

    pub(crate) fn stop(&self, mode: &str) {
        self.control(&["stop", "--mode", mode]);
    }

    pub(crate) fn promote(&self) {
        self.control(&["promote"]);
    }

    fn control(&self, what: &[&str]) {
        let mut command = owner("pg_ctl");
        command.args(what).args(["--wait", "--timeout", PATIENCE_SECONDS, "--silent", "--pgdata"]);
        self.must(run(command.arg(self.data())));
    }

    /// Stops every process of it, as a machine without a moment for them does.
    pub(crate) fn pause(&self) {
        for pid in self.frozen() {
            signal(pid, Signal::STOP);
        }
    }

    pub(crate) fn resume(&self) {
        for pid in self.processes() {
            signal(pid, Signal::CONT);
        }
    }

    /// Kills every process of it, as a machine that loses power does.
    pub(crate) fn kill(&self) {
        let processes = self.frozen();
        for pid in &processes {
            signal(*pid, Signal::KILL);
        }
        assert!(
            wait(PATIENCE, || !processes.iter().any(|pid| lives(*pid))),
            "killed processes end\n{}",
            self.log_tail()
        );
        self.forget();
    }

    /// Ends it in whatever state it is, paused and half started included, without a word when that fails.
    pub(crate) fn end(&self) {
        let Some(pid) = self.process() else { return self.forget() };
        self.resume();
        // At once, and it takes its children along and returns its shared memory.
        signal(pid, Signal::QUIT);
        if !wait(Duration::from_secs(10), || !lives(pid)) && self.process().is_some() {
            self.kill();
        }
    }

    /// Removes what would keep a killed server from starting again.
    ///
    /// Where the first process of a machine is slow to bury orphans, the dead keep their numbers, and the next server
    /// takes them for alive: it looks into the files that lock the data and the socket. And nobody else returns the
    /// segment by which servers find each other, of which a machine has a limited number.
    fn forget(&self) {
        let Ok(text) = fs::read_to_string(self.pid_file()) else { return };
        let line = |number: usize| text.lines().nth(number).unwrap_or_default();
        let (port, socket_folder, segment) = (line(3), line(4), line(6));
        let mut words = segment.split_whitespace();
        if let (Some(key), Some(id)) = (words.next(), words.next()) {
            // The children of a server that somebody else killed need a moment to notice.
            wait(Duration::from_secs(5), || users_of_segment(key, id).is_none_or(|count| count == "0"));
            if users_of_segment(key, id).is_some_and(|count| count == "0") {
                drop(run(as_server("ipcrm".as_ref()).args(["-m", id])));
            }
        }
        drop(fs::remove_file(Path::new(socket_folder).join(format!(".s.PGSQL.{port}.lock"))));
        drop(fs::remove_file(self.pid_file()));
    }

    // --- what it is at ------------------------------------------------------------------------------------------------

    /// Whether it takes connections; waits for one that is about to.
    pub(crate) fn answers(&self) -> bool {
        let Some(port) = self.port() else { return false };
        let mut code = None;
        let asked = wait(PATIENCE, || {
            let mut command = client("pg_isready");
            command.args(["--quiet", "--timeout=10", "--host=127.0.0.1", "--port", &port.to_string()]);
            code = command.status().ok().and_then(|status| status.code());
            // 1 says that somebody is there and takes no connections yet: it recovers from a crash.
            code != Some(1)
        });
        asked && code == Some(0)
    }

    /// The port of the running server.
    pub(crate) fn port(&self) -> Option<u16> {
        self.process()?;
        fs::read_to_string(self.pid_file()).ok()?.lines().nth(3)?.trim().parse().ok()
    }

    pub(crate) fn sql(&self, port: u16, statements: &str) -> String {
        // By the socket, where everybody is let in whatever rules a test has made.
        self.must(crate::psql(&socket_url(&self.folder, port, ""), statements))
    }

    fn log_file(&self) -> PathBuf {
        self.folder.join("log")
    }

    pub(crate) fn log(&self) -> String {
        fs::read(self.log_file()).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(40)..].join("\n");
        format!("--- the end of {}\n{tail}", self.log_file().display())
    }

    #[track_caller]
    fn must<T>(&self, result: Result<T, String>) -> T {
        result.unwrap_or_else(|error| panic!("{error}\n{}", self.log_tail()))
    }

    /// The first process, unless the number in the file is stale and may be somebody else's.
    fn process(&self) -> Option<Pid> {
        let pid = Pid::from_raw(fs::read_to_string(self.pid_file()).ok()?.lines().next()?.trim().parse().ok()?)?;
        let command = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
        let data = self.data();
        command.split(|byte| *byte == 0).any(|word| word == data.as_os_str().as_encoded_bytes()).then_some(pid)
    }

    /// The first process and its children; all other processes of a server are children of the first.
    fn processes(&self) -> Vec<Pid> {
        let Some(first) = self.process() else { return Vec::new() };
        let numbers = fs::read_dir("/proc").expect("the system lists its processes").flatten();
        let pids = numbers.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
        let children = pids.filter(|pid| stat(*pid).is_some_and(|stat| stat.parent == first.as_raw_nonzero().get()));
        [first].into_iter().chain(children).collect()
    }

    /// The processes, of which the first is stopped and starts no more of them.
    fn frozen(&self) -> Vec<Pid> {
        let first = self.process().unwrap_or_else(|| panic!("the server runs\n{}", self.log_tail()));
        signal(first, Signal::STOP);
        let stopped = || stat(first).is_none_or(|stat| matches!(stat.state, 'T' | 't' | 'Z'));
        assert!(wait(PATIENCE, stopped), "a stopped process stops\n{}", self.log_tail());
        self.processes()
    }
}

/// One that has ended meanwhile needs no signal.
fn signal(pid: Pid, signal: Signal) {
    let _ = kill_process(pid, signal);
}

/// How many processes have a segment of shared memory, if it is there. The key is asked for as well, because after a
/// restart of the machine the same id may be another one.
fn users_of_segment(key: &str, id: &str) -> Option<String> {
    let segments = fs::read_to_string("/proc/sysvipc/shm").ok()?;
    let mut all = segments.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let found = all.find(|fields| fields.len() > 6 && fields[..2] == [key, id])?;
    Some(found[6].to_owned())
}

struct Stat {
    state: char,
    parent: i32,
}

fn stat(pid: Pid) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // Behind the name, which stands in brackets and may hold anything.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    Some(Stat { state: fields.next()?.chars().next()?, parent: fields.next()?.parse().ok()? })
}

/// A dead process that nobody has waited for lives no more.
fn lives(pid: Pid) -> bool {
    stat(pid).is_some_and(|stat| !matches!(stat.state, 'Z' | 'X'))
}
