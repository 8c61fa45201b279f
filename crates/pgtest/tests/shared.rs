//! The shared cluster: who comes finds it, and it ends when nobody is left.

mod owner;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use owner::{listens, within};
use rustix::process::{Pid, Signal, kill_process};
use steadfast_pgtest::{psql, shared, shared_in};

const SOON: Duration = Duration::from_secs(30);

/// The processes whose command line has all these words; a dead one has none.
fn processes(words: &[&str]) -> Vec<Pid> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command);
        if words.iter().all(|word| command.contains(word)) {
            found.extend(entry.file_name().to_str().unwrap().parse().ok().and_then(Pid::from_raw));
        }
    }
    found
}

fn kill(words: &[&str]) {
    let found = processes(words);
    assert_eq!(found.len(), 1, "{words:?} name {found:?}");
    kill_process(found[0], Signal::KILL).unwrap();
    // The signal is sent, the locks are held until it has arrived.
    within(SOON, "a killed process ends", || processes(words).is_empty());
}

fn in_folder(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn processes_that_come_at_once_find_one_server_and_it_ends_after_the_last() {
    let folder = tempfile::tempdir().unwrap();
    let words = ["shared", in_folder(folder.path()), "1"];
    let users: Vec<_> = thread::scope(|scope| {
        let starts: Vec<_> = (0..4).map(|_| scope.spawn(|| owner::start(&words))).collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    let address = users[0].address().to_owned();
    assert!(users.iter().all(|user| user.address() == address));
    assert!(users.iter().any(|user| user.url != users[0].url), "each has a schema of its own");

    // However a user ends.
    let mut users = users.into_iter();
    let last = users.next().unwrap();
    for (number, user) in users.enumerate() {
        if number == 0 { user.kill() } else { user.close() }
    }
    thread::sleep(Duration::from_secs(2));
    assert!(listens(&address), "one still uses it");
    last.close();
    within(SOON, "the server ends, and its folder goes", || {
        !listens(&address) && !folder.path().join("cluster").exists()
    });

    // Whoever comes in whatever moment of an end finds a server that stays.
    for wait in [1000, 1050, 1150] {
        drop(shared_in(folder.path(), Duration::from_secs(1)));
        thread::sleep(Duration::from_millis(wait));
        let shared = shared_in(folder.path(), Duration::from_secs(1));
        let url = format!("postgres://steadfast@127.0.0.1:{}/postgres", shared.port());
        assert_eq!(psql(&url, "select pg_sleep(0.2), 1").as_deref(), Ok("|1"), "after {wait} ms");
    }
}

#[test]
fn a_killed_keeper_and_a_killed_server_are_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let shared = || shared_in(folder.path(), Duration::from_secs(1));
    let cluster = folder.path().join("cluster");
    let keeper = ["steadfast-keeper", in_folder(&cluster)];
    let first = shared();

    kill(&keeper);
    let second = shared();
    assert_eq!(first.port(), second.port(), "the server needs no other keeper than a new one");

    kill(&["/postgres", in_folder(&cluster)]);
    let third = shared();
    let url = format!("postgres://steadfast@127.0.0.1:{}/postgres", third.port());
    assert_eq!(psql(&url, "select 1").as_deref(), Ok("1"));

    kill(&keeper);
    drop((first, second, third));
    drop(shared());
    within(SOON, "the new keeper ends the server it found", || !cluster.exists());
}

#[test]
fn a_test_takes_a_schema_of_the_cluster_of_all_tests() {
    let shared = shared();
    let url = format!("postgres://steadfast@127.0.0.1:{}/postgres", shared.port());
    assert_eq!(shared.url("one"), format!("{url}?schema=one"));
    let (one, other) = (shared.fresh_url(), shared.fresh_url());
    assert_ne!(one, other);
    let schema = one.split_once("?schema=").unwrap().1;
    let rows = psql(
        &url,
        &format!(
            "create schema {schema};
             create table {schema}.rows (id int);
             insert into {schema}.rows values (1), (2);
             select sum(id), current_setting('fsync') from {schema}.rows;
             drop schema {schema} cascade"
        ),
    );
    assert!(rows.as_deref().is_ok_and(|rows| rows.starts_with("3|off")), "{rows:?}");
}
