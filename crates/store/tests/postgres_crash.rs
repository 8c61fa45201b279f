//! What becomes of commits when the server crashes, its standby lags behind, or another one takes its place.

mod harness;

use std::sync::Arc;
use std::time::{Duration, Instant};

use harness::{SECRET, decided};
use steadfast_core::admission::Asked;
use steadfast_core::command::{Command, Moment};
use steadfast_core::event::Writes;
use steadfast_core::json::Json;
use steadfast_core::limits::Limits;
use steadfast_core::options::StartOptions;
use steadfast_core::text::{Name, Namespace, WorkflowId, WorkflowKey};
use steadfast_pgtest::{Cluster, Cut, Mode, Proxy};
use steadfast_store::clock::ManualClock;
use steadfast_store::conformance::{Applied, DAY_ONE, apply};
use steadfast_store::postgres::PostgresStore;
use steadfast_store::{Fate, Saved, Store};

const MOMENT: Moment = Moment { now: DAY_ONE, epoch: 1 };

fn open(url: &str) -> PostgresStore {
    PostgresStore::open_with(url, Arc::new(ManualClock::new(DAY_ONE)), || Ok(SECRET)).expect("the store opens")
}

fn start(id: &str) -> Command {
    let asked = Asked {
        key: WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted(id) },
        name: Name::trusted("a"),
        input: Json::null(),
        writes: Writes::default(),
        options: StartOptions::default(),
    };
    Command::Start(Box::new(asked.check(&Default::default(), &SECRET, &Limits::default()).expect("it is well formed")))
}

/// The standby that is promoted never had it, so it has not happened; and what is asked once more is told the same.
#[test]
fn a_commit_that_a_failover_has_lost_has_not_happened() {
    let primary = Cluster::start(&[]);
    let standby = primary.standby(false);
    let proxy = Proxy::start(primary.port());
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", proxy.port(), standby.port());
    let store = open(&format!("postgres://steadfast@{hosts}/postgres?committers=1"));
    let mut writer = store.writer().expect("a writer");
    assert!(matches!(apply(writer.as_mut(), &MOMENT, &[start("before")]), Applied::Committed(_)));
    let begin = Instant::now();
    while standby.sql("select count(*) from pg_tables where schemaname = 'steadfast'") == "0"
        || standby.sql("select count(*) from steadfast.admissions") != "1"
    {
        assert!(begin.elapsed() < Duration::from_secs(20), "the standby follows");
        std::thread::sleep(Duration::from_millis(50));
    }
    standby.stop(Mode::Immediate);
    let snapshot = decided(writer.as_mut(), &MOMENT, &[start("lost")]);
    proxy.cut_commits(Cut::After, 1);
    assert!(matches!(writer.save(&snapshot), Saved::Unknown(_)), "its answer is lost");
    assert_eq!(primary.sql("select count(*) from steadfast.admissions"), "2", "here it has happened");
    proxy.refuse(true);
    primary.kill();
    standby.start_again();
    standby.promote();
    let fate = loop {
        assert!(begin.elapsed() < Duration::from_secs(60), "it recovers with the standby");
        if let Ok(fate) = writer.recover() {
            break fate;
        }
    };
    assert_eq!((fate, standby.sql("select count(*) from steadfast.admissions").as_str()), (Fate::NotCommitted, "1"));
    assert_eq!(standby.sql("select count(*) from steadfast.batches where void"), "1", "nor can it happen any more");
}

/// The number of a transaction that was about to save is given to another after a crash: nothing goes by it.
#[test]
fn a_transaction_lost_in_a_crash_is_not_taken_for_another_with_its_number() {
    let cluster = Cluster::start(&[]);
    let store = open(&cluster.url("committers=2"));
    let (mut one, mut other) = (store.writer().expect("a writer"), store.writer().expect("another writer"));
    let snapshot = decided(one.as_mut(), &MOMENT, &[start("lost")]);
    cluster.stop(Mode::Immediate);
    cluster.start_again();
    // It learns of the crash by the first of these.
    let committed = (0..6)
        .filter(|n| match apply(other.as_mut(), &MOMENT, &[start(&format!("other-{n}"))]) {
            Applied::Committed(_) => true,
            _ => other.recover().is_err(),
        })
        .count();
    assert!(committed >= 3, "others have numbers too: {committed}");
    assert!(matches!(one.save(&snapshot), Saved::Unknown(_) | Saved::NotCommitted(_)), "its connection is gone");
    let fate = one.recover().expect("the server is back");
    let there = cluster.sql("select count(*) from steadfast.admissions where id = 'lost'");
    assert_eq!((fate, there.as_str()), (Fate::NotCommitted, "0"));
}

/// A backend that waits for its standby and is told to end has committed here, and nowhere else.
#[test]
fn a_commit_that_no_standby_has_is_not_told_as_committed() {
    a_commit_waits_for_its_standby(|_| {}, |_| {});
}

/// The commit that the first one is to be waited for with changed the node's own row, and so nothing when that was gone.
#[test]
fn a_commit_that_no_standby_has_is_not_told_as_committed_to_a_node_that_was_buried() {
    let bury = |primary: &Cluster| drop(primary.sql("delete from steadfast.nodes"));
    // The backend waits no more, and its commit is there.
    a_commit_waits_for_its_standby(bury, |primary| assert!(primary.terminate_backends() > 0));
}

fn a_commit_waits_for_its_standby(before: impl Fn(&Cluster), after: impl Fn(&Cluster)) {
    let primary = Cluster::start(&[("log_connections", "on")]);
    let standby = primary.standby(true);
    let proxy = Proxy::start(primary.port());
    let store = open(&proxy.url(""));
    let mut writer = store.writer().expect("a writer");
    before(&primary);
    let snapshot = decided(writer.as_mut(), &MOMENT, &[start("w1")]);
    standby.pause();
    let connections = || primary.log().matches("connection authorized: user=steadfast").count();
    let had = connections();
    std::thread::scope(|scope| {
        let proxy = &proxy;
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(500));
            proxy.sever();
        });
        assert!(matches!(writer.save(&snapshot), Saved::Unknown(_)), "its answer is lost");
    });
    after(&primary);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        let fate = writer.recover();
        assert!(!matches!(fate, Ok(Fate::Committed)), "the standby does not have it");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (made, most) = (connections() - had, 10);
    assert!(made < most, "a question that is asked again needs no new connection: {made}");
    standby.resume();
    let fate = loop {
        assert!(begin.elapsed() < Duration::from_secs(60), "it recovers with the standby");
        if let Ok(fate) = writer.recover() {
            break fate;
        }
    };
    assert_eq!(fate, Fate::Committed);
}

/// A connection that nobody has broken leads to the primary before for ever, and so does the list of hosts.
#[test]
fn a_writer_that_has_no_trouble_hears_of_a_promotion() {
    let primary = Cluster::start(&[]);
    let standby = primary.standby(false);
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", primary.port(), standby.port());
    let store = open(&format!("postgres://steadfast@{hosts}/postgres?committers=1"));
    let mut writer = store.writer().expect("a writer");
    assert!(matches!(apply(writer.as_mut(), &MOMENT, &[start("before")]), Applied::Committed(_)));
    let count = |cluster: &Cluster, id: &str| {
        cluster.sql(&format!("select count(*) from steadfast.admissions where id = '{id}'"))
    };
    // The connection for the lease is made after four; then there is none to make.
    std::thread::sleep(Duration::from_secs(5));
    let follows = "select count(*) from pg_stat_replication where replay_lsn >= pg_current_wal_lsn()";
    let begin = Instant::now();
    while primary.sql(follows) != "1" {
        assert!(begin.elapsed() < Duration::from_secs(60), "the standby follows");
        std::thread::sleep(Duration::from_millis(20));
    }
    standby.promote();
    let begin = Instant::now();
    for n in 0.. {
        let id = format!("w{n}");
        match apply(writer.as_mut(), &MOMENT, &[start(&id)]) {
            Applied::Committed(_) if count(&standby, &id) == "1" => break,
            Applied::Committed(_) => assert_eq!(count(&primary, &id), "1"),
            _ => drop(writer.recover()),
        }
        assert!(begin.elapsed() < Duration::from_secs(10), "it does not hear of it");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(writer.epoch(), 2);
    standby.stop(Mode::Immediate);
    drop(apply(writer.as_mut(), &MOMENT, &[start("nowhere")]));
    let refused = writer.recover().expect_err("there is none to connect to").to_string();
    assert!(refused.contains("it takes writes on timeline 1, and its cluster has gone on to 2 elsewhere"), "{refused}");
}
