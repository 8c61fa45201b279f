//! What a process remembers of the heads that it wrote, and what it takes for granted, is never what it goes by in the end.

mod harness;

use std::sync::Arc;

use harness::{SECRET, decided};
use steadfast_core::admission::{self, Asked};
use steadfast_core::claim::{Announced, Granted, Held, Request, Steps, Terms};
use steadfast_core::command::{Command, Moment, Outcome};
use steadfast_core::commit::{self, Complete, Continuation, When};
use steadfast_core::control::Cancel;
use steadfast_core::event::Writes;
use steadfast_core::head::WorkerRef;
use steadfast_core::heartbeat::{self, Beat};
use steadfast_core::json::Json;
use steadfast_core::limits::Limits;
use steadfast_core::options::StartOptions;
use steadfast_core::sweep::{Boots, GiveBack};
use steadfast_core::text::{Name, Namespace, Step, WorkflowId, WorkflowKey};
use steadfast_pgtest::Cluster;
use steadfast_store::clock::ManualClock;
use steadfast_store::conformance::{Applied, DAY_ONE, apply};
use steadfast_store::postgres::PostgresStore;
use steadfast_store::{Saved, Store, Writer};

const MOMENT: Moment = Moment { now: DAY_ONE, epoch: 1 };

fn open(cluster: &Cluster) -> (PostgresStore, Box<dyn Writer>) {
    let clock = Arc::new(ManualClock::new(DAY_ONE));
    let store = PostgresStore::open_with(&cluster.url("committers=2"), clock, || Ok(SECRET)).expect("the store opens");
    let writer = store.writer().expect("a writer");
    (store, writer)
}

fn key(id: &str) -> WorkflowKey {
    WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted(id) }
}

fn terms(seed: u8) -> Terms {
    Terms {
        worker: WorkerRef { label: format!("worker {seed}").into(), boot: 1, remote: false },
        announced: Arc::new(Announced {
            namespace: Namespace::default_namespace(),
            definitions: [(Name::trusted("a"), Steps::AllBut([].into()))].into(),
        }),
        lease_ms: 30_000,
        seed: [seed; 32],
    }
}

/// A start that claims the first step.
fn start(id: &str) -> Command {
    let asked = Asked {
        key: key(id),
        name: Name::trusted("a"),
        input: Json::null(),
        writes: Writes::default(),
        options: StartOptions::default(),
    };
    let mut start = asked.check(&Default::default(), &SECRET, &Limits::default()).expect("it is well formed");
    start.claim = Some(terms(1));
    Command::Start(Box::new(start))
}

fn complete(held: Held) -> Command {
    let continuation = Continuation::Step { step: Step::trusted("next"), when: When::Now };
    let claim_next = Some(terms(1));
    Command::Complete(Box::new(Complete { held, writes: Writes::default(), continuation, claim_next }))
}

fn outcomes(writer: &mut dyn Writer, commands: &[Command]) -> Vec<Outcome> {
    match apply(writer, &MOMENT, commands) {
        Applied::Committed(outcomes) | Applied::Unchanged(outcomes) => outcomes,
        other => panic!("{other:?}"),
    }
}

fn started(writer: &mut dyn Writer, id: &str) -> Granted {
    match outcomes(writer, &[start(id)]).pop() {
        Some(Outcome::Start(admission::Outcome::Started { claimed: Some(granted) })) => granted,
        other => panic!("{other:?}"),
    }
}

fn log(cluster: &Cluster, id: &str) -> String {
    let text =
        format!("select string_agg(type, ' ' order by seq) from steadfast.workflow_events where workflow_id = '{id}'");
    cluster.sql(&text)
}

fn assert_sound(store: &PostgresStore) {
    let verified = store.reader().verify(&mut |_| ()).expect("it can be verified");
    assert_eq!(verified.faults, []);
}

/// A server that stands still would not answer a look.
#[test]
fn a_step_is_decided_without_a_look_at_the_server() {
    let cluster = Cluster::start(&[]);
    let (store, mut writer) = open(&cluster);
    let first = started(writer.as_mut(), "w");
    cluster.pause();
    let snapshot = decided(writer.as_mut(), &MOMENT, &[complete(first.held), start("another")]);
    cluster.resume();
    assert!(matches!(writer.save(&snapshot), Saved::Written));
    assert_eq!(log(&cluster, "w"), "workflow_created step_started step_completed step_started");
    assert_eq!(log(&cluster, "another"), "workflow_created step_started");
    assert_sound(&store);
}

/// A claim goes to whatever committer has time, and the step's commit to that of the workflow.
#[test]
fn the_committers_of_a_process_remember_together() {
    let cluster = Cluster::start(&[]);
    let (store, mut one) = open(&cluster);
    let mut other = store.writer().expect("another writer");
    let first = started(one.as_mut(), "w");
    cluster.pause();
    let snapshot = decided(other.as_mut(), &MOMENT, &[complete(first.held.clone())]);
    cluster.resume();
    assert!(matches!(other.save(&snapshot), Saved::Written));
    let answers = outcomes(one.as_mut(), &[complete(first.held)]);
    assert!(matches!(&answers[..], [Outcome::Commit(commit::Outcome::AlreadyCommitted(_))]), "{answers:?}");
    assert_sound(&store);
}

/// Those that did not commit deleted nothing.
#[test]
fn the_rows_of_batches_stay_few() {
    let cluster = Cluster::start(&[]);
    let (store, mut writer) = open(&cluster);
    for n in 1..=600 {
        if n % 64 == 0 {
            // Refused, and decided anew.
            cluster.sql("update steadfast.store set epoch = epoch + 1");
        }
        let epoch = writer.epoch();
        let Applied::Committed(_) = apply(writer.as_mut(), &Moment { epoch, ..MOMENT }, &[start(&format!("w-{n}"))])
        else {
            panic!("{n} is committed in the end")
        };
    }
    let rows: u32 = cluster.sql("select count(*) from steadfast.batches").parse().expect("a number");
    assert!((1..=256).contains(&rows), "{rows}");
    assert_eq!(cluster.sql("select max(batch) = 600 from steadfast.batches"), "f", "some were refused");
    drop(writer);
    drop(store);
    assert_eq!(cluster.sql("select count(*) from steadfast.batches"), "0", "nobody asks for them any more");
}

#[test]
fn what_another_node_has_ended_stays_ended() {
    let cluster = Cluster::start(&[]);
    let ((store, mut one), (_other_store, mut other)) = (open(&cluster), open(&cluster));
    let (ended, lives) = (started(one.as_mut(), "ended"), started(one.as_mut(), "lives"));
    let cancel = Command::Cancel(Cancel { key: key("ended"), reason: String::new(), by: String::new() });
    outcomes(other.as_mut(), &[cancel]);
    let answers = outcomes(one.as_mut(), &[complete(lives.held), complete(ended.held)]);
    assert!(
        matches!(
            &answers[..],
            [Outcome::Commit(commit::Outcome::Committed(_)), Outcome::Commit(commit::Outcome::Lost)]
        ),
        "{answers:?}"
    );
    assert_eq!(log(&cluster, "ended"), "workflow_created step_started workflow_cancelled");
    assert_eq!(log(&cluster, "lives"), "workflow_created step_started step_completed step_started");
    assert_sound(&store);
}

/// A heartbeat leaves no event that another one would collide with.
#[test]
fn what_another_node_has_noted_stays_noted() {
    let cluster = Cluster::start(&[]);
    let ((store, mut one), (_other_store, mut other)) = (open(&cluster), open(&cluster));
    let held = started(one.as_mut(), "w").held;
    let beat = |progress: Option<Json>| {
        Command::Heartbeat(heartbeat::Request { beats: vec![Beat { held: held.clone(), progress }] })
    };
    let half = Json::trusted("50");
    outcomes(one.as_mut(), &[beat(Some(Json::trusted("10")))]);
    outcomes(other.as_mut(), &[beat(Some(half.clone()))]);
    outcomes(one.as_mut(), &[beat(None)]);
    let head = store.reader().head(&key("w")).expect("it is looked at").expect("it is there");
    assert_eq!(head.claim.and_then(|claim| claim.progress), Some(half));
    assert_sound(&store);
}

/// What is refused changes nothing, so no statement would have noticed that it was refused for what is long over.
#[test]
fn nothing_is_refused_for_what_is_only_remembered() {
    let cluster = Cluster::start(&[]);
    let ((store, mut one), (_other_store, mut other)) = (open(&cluster), open(&cluster));
    let lost = started(one.as_mut(), "w");
    let give_back = Command::GiveBack(GiveBack {
        boots: Boots { until: 9, alive: [].into() },
        orphaned: vec![],
        after: None,
        limit: 10,
        deliveries_max: 20,
    });
    let claim = Command::Claim(Request { terms: terms(2), n: 1, id: None });
    outcomes(other.as_mut(), &[give_back]);
    let again = match outcomes(other.as_mut(), &[claim]).pop() {
        Some(Outcome::Claim(page)) => page.granted.into_iter().next().expect("it was given back"),
        other => panic!("{other:?}"),
    };
    // Its worker talks to the node that granted the first claim.
    let answers = outcomes(one.as_mut(), &[complete(again.held)]);
    assert!(matches!(&answers[..], [Outcome::Commit(commit::Outcome::Committed(_))]), "{answers:?}");
    let answers = outcomes(one.as_mut(), &[complete(lost.held)]);
    assert!(matches!(&answers[..], [Outcome::Commit(commit::Outcome::Lost)]), "{answers:?}");
    assert_sound(&store);
}

#[test]
fn an_id_that_is_taken_for_new_and_is_not_is_a_replay() {
    let cluster = Cluster::start(&[]);
    let ((store, mut one), (_other_store, mut other)) = (open(&cluster), open(&cluster));
    started(one.as_mut(), "w");
    for round in 0..3 {
        // With this one it has a number to spare for the next.
        started(other.as_mut(), &format!("other-{round}"));
        let answers = outcomes(other.as_mut(), &[start("w"), start(&format!("beside-{round}"))]);
        assert!(
            matches!(
                &answers[..],
                [
                    Outcome::Start(admission::Outcome::Replay { .. }),
                    Outcome::Start(admission::Outcome::Started { claimed: Some(_) })
                ]
            ),
            "{answers:?}"
        );
    }
    assert_eq!(cluster.sql("select count(*) from steadfast.admissions"), "7");
    assert_sound(&store);
}

/// An epoch that was raised by whoever restored the store voids what was decided before.
#[test]
fn nothing_is_written_under_an_epoch_that_is_over() {
    let cluster = Cluster::start(&[]);
    let (store, mut writer) = open(&cluster);
    let first = started(writer.as_mut(), "w");
    cluster.sql("update steadfast.store set epoch = epoch + 1");
    let command = complete(first.held);
    let snapshot = decided(writer.as_mut(), &MOMENT, std::slice::from_ref(&command));
    let saved = writer.save(&snapshot);
    assert!(matches!(saved, Saved::NotCommitted(_)), "{saved:?}");
    assert_eq!(log(&cluster, "w"), "workflow_created step_started");
    drop(decided(writer.as_mut(), &MOMENT, &[command]));
    assert_eq!(writer.epoch(), 2);
    writer.abandon();
    assert_sound(&store);
}

/// A newer release has migrated the store to what this one does not understand, while a batch was on its way.
#[test]
fn a_release_that_may_no_longer_use_the_store_writes_nothing_more() {
    let cluster = Cluster::start(&[]);
    let (_store, mut writer) = open(&cluster);
    let first = started(writer.as_mut(), "w");
    let snapshot = decided(writer.as_mut(), &MOMENT, &[complete(first.held.clone())]);
    cluster.sql("update steadfast.store set version = 2, oldest = 2");
    match writer.save(&snapshot) {
        Saved::NotCommitted(error) => assert_eq!(error.code(), "store_busy", "{error}"),
        other => panic!("{other:?}"),
    }
    for command in [complete(first.held.clone()), start("another")] {
        match apply(writer.as_mut(), &MOMENT, &[command]) {
            Applied::NotCommitted(error) => assert_eq!(error.code(), "store_foreign", "{error}"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(log(&cluster, "w"), "workflow_created step_started");
    assert_eq!(log(&cluster, "another"), "");
    // As when the release is set up again.
    cluster.sql("update steadfast.store set version = 1, oldest = 1");
    outcomes(writer.as_mut(), &[complete(first.held)]);
}
