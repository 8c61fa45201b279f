//! Contention: nodes, clients and strangers that reach for the same rows of one PostgreSQL database.
//!
//! Each test counts for its process, and so needs one of its own, as nextest gives it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use steadfast::core::claim::{Announced, Request as ClaimRequest, Steps, Terms};
use steadfast::core::command::{Command, Moment, Outcome};
use steadfast::core::head::WorkerRef;
use steadfast::core::text::{Name, Namespace};
use steadfast::store::conformance::{Applied, apply};
use steadfast::store::postgres::PostgresStore;
use steadfast::store::{Cursor, Filter, Store};
use steadfast::{Ctx, Engine, Request, StepResult, done, step};
use steadfast_pgtest::{Cluster, psql};

const STUCK: Duration = Duration::from_secs(120);

async fn within<F: IntoFuture>(work: F) -> F::Output {
    tokio::time::timeout(STUCK, work.into_future()).await.expect("it is done in time")
}

/// A few steps, the second of them after a short sleep.
async fn count_up(ctx: Ctx) -> StepResult {
    let to: u32 = ctx.get("input").await?.unwrap_or(3);
    let at: u32 = ctx.get("at").await?.unwrap_or(0) + 1;
    ctx.set("at", &at)?;
    let next = step(format!("s{at}"));
    Ok(if at >= to {
        done(at)
    } else if at == 1 {
        next.after(Duration::from_millis(30))
    } else {
        next
    })
}

fn node(url: &str, concurrency: usize) -> Engine {
    Engine::open(url)
        .expect("the store opens")
        .register("count", count_up)
        .concurrency(concurrency)
        .run()
        .expect("it runs")
}

/// Waits until this answers that.
async fn wait_for(cluster: &Cluster, statement: &str, answer: &str) {
    let begin = Instant::now();
    while cluster.sql(statement) != answer {
        assert!(begin.elapsed() < STUCK, "{statement} is still {}", cluster.sql(statement));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn verify(engine: &Engine) {
    let verified = engine.look(|reader| reader.verify(&mut |_| {})).await.expect("it can be verified");
    assert_eq!(verified.fault_count, 0, "{:?}", verified.faults);
}

/// Counts what this process counts, for the one test that it runs.
#[derive(Debug, Default)]
struct Counted(Mutex<BTreeMap<String, Arc<AtomicU64>>>);

/// Counters of this process so far, by name and labels.
fn counted() -> BTreeMap<String, u64> {
    let counters = recorder().0.lock().unwrap_or_else(PoisonError::into_inner);
    counters.iter().map(|(name, counter)| (name.clone(), counter.load(Ordering::Relaxed))).collect()
}

/// How many batches were decided anew, by cause.
fn raced() -> BTreeMap<String, u64> {
    let raced = |(name, n): (String, u64)| Some((name.strip_prefix("steadfast_raced_total ")?.to_owned(), n));
    counted().into_iter().filter_map(raced).collect()
}

fn recorder() -> &'static Counted {
    static COUNTED: OnceLock<&Counted> = OnceLock::new();
    COUNTED.get_or_init(|| {
        let counted: &'static Counted = Box::leak(Box::default());
        metrics::set_global_recorder(counted).expect("nobody else counts");
        counted
    })
}

impl metrics::Recorder for &'static Counted {
    fn describe_counter(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}
    fn describe_gauge(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}
    fn describe_histogram(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}

    fn register_counter(&self, key: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Counter {
        let labels: String = key.labels().map(|label| format!(" {}", label.value())).collect();
        let mut counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        metrics::Counter::from_arc(counters.entry(format!("{}{labels}", key.name())).or_default().clone())
    }

    fn register_gauge(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Gauge {
        metrics::Gauge::noop()
    }

    fn register_histogram(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Histogram {
        metrics::Histogram::noop()
    }
}

/// Numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % n
    }

    fn shuffled<T>(&mut self, mut items: Vec<T>) -> Vec<T> {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
        items
    }
}

/// Claims like a worker elsewhere that is never heard of again: its leases are over at once.
fn claim_and_be_silent(url: &str, over: &AtomicBool) -> usize {
    let store = PostgresStore::open(url).expect("it opens");
    let mut writer = store.writer().expect("it has a writer");
    let announced = Arc::new(Announced {
        namespace: Namespace::default_namespace(),
        definitions: [(Name::trusted("count"), Steps::AllBut([].into()))].into(),
    });
    let worker = WorkerRef { label: "silent".into(), boot: 0, remote: true };
    let mut claimed = 0;
    for seed in 0_u64.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let mut terms = Terms { worker: worker.clone(), announced: announced.clone(), lease_ms: 1, seed: [9; 32] };
        terms.seed[..8].copy_from_slice(&seed.to_be_bytes());
        let moment = Moment { now: store.clock().now(), epoch: writer.epoch() };
        let claim = Command::Claim(ClaimRequest { terms, n: 3, id: None });
        match apply(writer.as_mut(), &moment, &[claim]) {
            Applied::Committed(outcomes) | Applied::Unchanged(outcomes) => {
                if let [Outcome::Claim(page)] = &outcomes[..] {
                    claimed += page.granted.len();
                }
            }
            other => panic!("{other:?}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    claimed
}

/// Bulk admissions of the same ids in any order, claims, commits, sleeps, lost leases, cancels and reads on
/// several nodes at once: no deadlock, no waiting for each other, every admission answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_mixed_load_on_several_nodes_meets_no_deadlock() {
    const IDS: usize = 600;
    recorder();
    // A deadlock is found before anybody gives up waiting for a row.
    let cluster = Cluster::start(&[("deadlock_timeout", "50ms")]);
    let url = cluster.url("");
    let nodes = [node(&url, 16), node(&url, 16), node(&url, 0)];
    let over = Arc::new(AtomicBool::new(false));
    let silent = tokio::task::spawn_blocking({
        let (url, over) = (url.clone(), over.clone());
        move || claim_and_be_silent(&url, &over)
    });
    let clients = (0..24).map(|client| {
        let node = nodes[client % nodes.len()].clone();
        async move {
            let mut dice = Dice(client as u64);
            let (mut started, mut replayed) = (0, 0);
            for round in 0..4 {
                let ids = dice.shuffled((0..IDS / 4).collect());
                let request = |n| Request::new("count").id(format!("r{round}-{n}")).input(&3);
                for outcome in node.start_many(ids.into_iter().take(90).map(request).collect()).await.unwrap() {
                    match outcome {
                        Ok(accepted) if accepted.replay => replayed += 1,
                        Ok(_) => started += 1,
                        Err(error) => panic!("an admission was lost: {error}"),
                    }
                }
                for _ in 0..2 {
                    let id = format!("r{round}-{}", dice.below(IDS / 4));
                    node.cancel(&id, "enough", "test").await.expect("a cancel is answered");
                    drop(node.head(&id).await);
                }
            }
            (started, replayed)
        }
    });
    let reads = {
        let (node, over) = (nodes[2].clone(), over.clone());
        async move {
            let mut pages = 0;
            while !over.load(Ordering::Relaxed) {
                let filter = Filter::all(Namespace::default_namespace());
                let page = node.look(move |reader| reader.list(&filter, None::<Cursor>, 50)).await.expect("it lists");
                pages += page.items.len();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            pages
        }
    };
    let reads = tokio::spawn(reads);
    let answered: Vec<(usize, usize)> = within(futures_util::future::join_all(clients)).await;
    over.store(true, Ordering::Relaxed);
    let silent = within(silent).await.unwrap();
    within(reads).await.unwrap();
    let (started, replayed) = answered.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    assert_eq!(started + replayed, 24 * 4 * 90, "each was answered");
    let live = "select count(*) from steadfast.heads where status not in ('completed', 'failed', 'cancelled')";
    wait_for(&cluster, live, "0").await;
    verify(&nodes[2]).await;
    let there = cluster.sql("select count(*), count(distinct id) from steadfast.admissions");
    assert_eq!(there, format!("{started}|{started}"), "each id once");
    let claims: u64 = cluster.sql("select count(*) from steadfast.events where type = 'step_started'").parse().unwrap();
    for node in nodes {
        node.shutdown(STUCK).await;
    }
    assert_no_deadlock(&cluster);
    let (raced, commits) = (raced(), counted()["steadfast_commits_total"]);
    let told = format!(
        "{started} started, {replayed} replayed, {claims} claims, {silent} in silence, {commits} commits, {raced:?}"
    );
    // Most are ids that another one admits at the same moment; on an idle machine it is one in thirty.
    assert!(raced.values().sum::<u64>() <= commits / 4, "{told}");
}

/// Once all nodes are closed, and with them the connections that count.
fn assert_no_deadlock(cluster: &Cluster) {
    let deadlocks = cluster.sql("select deadlocks from pg_stat_database where datname = current_database()");
    assert_eq!(deadlocks, "0");
    assert!(!cluster.log().contains("deadlock detected"));
}

/// Batches of the same ids, each in an order of its own, reach for the same keys while rows are slow to write: who
/// meets another waits for it, and never in a circle.
#[tokio::test(flavor = "multi_thread")]
async fn the_same_ids_in_any_order_are_waited_for_in_one_direction() {
    recorder();
    let cluster = Cluster::start(&[("deadlock_timeout", "20ms")]);
    let url = cluster.url("committers=1");
    let nodes = [node(&url, 0), node(&url, 0), node(&url, 0)];
    cluster.sql(
        "create function steadfast.linger() returns trigger language plpgsql as $$ begin
             perform pg_sleep(0.002); return new;
         end $$;
         create trigger linger before insert on steadfast.admissions for each row execute function steadfast.linger()",
    );
    let mut dice = Dice(1);
    for round in 0..6 {
        let bulks = nodes.iter().map(|node| {
            let ids = dice.shuffled((0..50).collect());
            let request = |n: usize| Request::new("count").id(format!("r{round}-{n}")).input(&3);
            let bulk = ids.into_iter().map(request).collect();
            async move { node.start_many(bulk).await }
        });
        let answers = within(futures_util::future::try_join_all(bulks)).await.expect("bulks are answered");
        let accepted = answers.into_iter().flatten().map(|answer| answer.expect("an admission is answered"));
        assert_eq!(accepted.filter(|accepted| !accepted.replay).count(), 50, "each was new to one of them");
    }
    verify(&nodes[0]).await;
    for node in nodes {
        node.shutdown(STUCK).await;
    }
    assert_no_deadlock(&cluster);
    assert!(raced()["key"] > 0, "they have met");
}

/// Many claimers of several nodes on one backlog seldom meet, and then one of them is not set back for it.
#[tokio::test(flavor = "multi_thread")]
async fn claimers_of_several_nodes_on_one_backlog_seldom_meet() {
    const WORKFLOWS: usize = 1_500;
    recorder();
    let cluster = Cluster::start(&[("deadlock_timeout", "50ms")]);
    let url = cluster.url("");
    let front = node(&url, 0);
    let requests = (0..WORKFLOWS).map(|n| Request::new("count").id(format!("w-{n}")).input(&3)).collect();
    within(front.start_many(requests)).await.unwrap().into_iter().for_each(|accepted| drop(accepted.unwrap()));
    let nodes = [node(&url, 16), node(&url, 16), node(&url, 16), node(&url, 16)];
    wait_for(&cluster, "select count(*) from steadfast.heads where status <> 'completed'", "0").await;
    verify(&front).await;
    let events = cluster.sql("select count(*) filter (where type = 'step_started'), count(*) from steadfast.events");
    assert_eq!(events, format!("{}|{}", WORKFLOWS * 3, WORKFLOWS * 8), "each step ran once");
    for node in nodes.into_iter().chain([front]) {
        node.shutdown(STUCK).await;
    }
    assert_no_deadlock(&cluster);
    let raced = raced();
    assert!(raced.values().sum::<u64>() * 100 < WORKFLOWS as u64 * 3, "{raced:?}");
}

/// What makes the next statements on a table fail, as many as are left; a sequence counts, for it is not rolled back.
fn plant(cluster: &Cluster, table: &str, when: &str, code: &str, times: u32) {
    cluster.sql(&format!(
        "create sequence if not exists steadfast.faults; select setval('steadfast.faults', 1, false);
         create or replace function steadfast.fail() returns trigger language plpgsql as $$ begin
             if nextval('steadfast.faults') <= {times} then raise 'injected' using errcode = '{code}'; end if;
             return new;
         end $$;
         create {when} on steadfast.{table} {deferred} for each row execute function steadfast.fail()",
        deferred = if when.contains("constraint") { "deferrable initially deferred" } else { "" },
    ));
}

/// Whatever the server ends our transaction for that another try may not meet again is met by another try.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_server_undoes_for_others_is_done_again_unheard() {
    recorder();
    let cluster = Cluster::start(&[]);
    let engine = node(&cluster.url(""), 4);
    within(within(engine.start("count", &2).id("before")).await.unwrap().end()).await.unwrap();
    for (code, cause) in [("40P01", "deadlock"), ("40001", "serialization"), ("55P03", "held")] {
        for (table, when) in [
            ("admissions", "trigger fault before insert"),
            ("heads", "trigger fault before update"),
            ("batches", "trigger fault before insert"),
            // At the commit itself.
            ("events", "constraint trigger fault after insert"),
        ] {
            plant(&cluster, table, when, code, 3);
            let id = format!("{cause}-{table}");
            let accepted = within(engine.start_request(Request::new("count").id(&id).input(&2))).await;
            let accepted = accepted.unwrap_or_else(|error| panic!("{id}: {error}"));
            assert!(!accepted.replay, "{id}: it was admitted once");
            assert_eq!(within(engine.handle(&id).result::<u32>()).await.unwrap(), 2);
            assert!(
                cluster.sql("select last_value from steadfast.faults").parse::<u32>().unwrap() > 3,
                "{id}: all were met"
            );
            cluster.sql(&format!("drop trigger fault on steadfast.{table}"));
            let head = engine.head(&id).await.unwrap();
            assert_eq!(head.seq, 5, "{id}: two steps, each started and committed once, and the end");
        }
        assert!(raced()[cause] >= 3 * 3, "{:?}", raced());
    }
    verify(&engine).await;
    engine.shutdown(STUCK).await;
}

/// A stranger locks in the other order, and PostgreSQL ends our transaction for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_with_a_stranger_is_not_heard_of() {
    recorder();
    let cluster = Cluster::start(&[("deadlock_timeout", "500ms")]);
    let engine = node(&cluster.url(""), 0);
    within(engine.start("count", &1).id("before")).await.unwrap();
    // On a machine that stands still for half a second the wait may be over before it is a deadlock.
    for round in 0..5 {
        let id = format!("w-{round}");
        let stranger = format!(
            "set deadlock_timeout = '60s';
             begin;
             lock table steadfast.events in share mode;
             do $$ begin
                 for n in 1 .. 30000 loop
                     exit when exists (select from pg_locks where not granted and pg_backend_pid() = any(pg_blocking_pids(pid)));
                     perform pg_sleep(0.002);
                 end loop;
                 insert into steadfast.admissions (workflow, admitted_at, namespace, id, fingerprint)
                     values (-1, 0, 1, '{id}', decode(repeat('00', 33), 'hex'));
             end $$;
             rollback"
        );
        std::thread::scope(|scope| {
            let stranger = scope.spawn(|| cluster.sql(&stranger));
            tokio::task::block_in_place(|| {
                tokio::runtime::Handle::current().block_on(async {
                    let locked = "select count(*) from pg_locks
                                  where mode = 'ShareLock' and relation = 'steadfast.events'::regclass and granted";
                    wait_for(&cluster, locked, "1").await;
                    let accepted = within(engine.start_request(Request::new("count").id(&id))).await;
                    assert!(!accepted.expect("it is admitted").replay);
                });
            });
            stranger.join().expect("the stranger is not the one who is ended");
        });
        if cluster.log().contains("deadlock detected") {
            assert_eq!(raced()["deadlock"], 1);
            verify(&engine).await;
            engine.shutdown(STUCK).await;
            return;
        }
    }
    panic!("there was no deadlock");
}

/// Two nodes admit one id; the first is rolled back after the second has met its key. The one id is there once,
/// each caller holds a receipt for it, and not both were told that the other admitted it.
#[tokio::test(flavor = "multi_thread")]
async fn one_id_is_admitted_once_though_the_first_to_reach_for_it_is_rolled_back() {
    recorder();
    let cluster = Cluster::start(&[]);
    let url = cluster.url("");
    let nodes = [node(&url, 0), node(&url, 0)];
    for node in &nodes {
        within(node.start("count", &1)).await.unwrap();
    }
    cluster.sql(
        "create sequence steadfast.faults;
         create table steadfast.ending (by text);
         insert into steadfast.ending values ('');
         create function steadfast.fail() returns trigger language plpgsql as $$ declare ending text; begin
             select by into ending from steadfast.ending;
             if ending <> '' and nextval('steadfast.faults') = 1 then
                 while not exists (select from pg_locks where not granted and pg_backend_pid() = any(pg_blocking_pids(pid)))
                 loop perform pg_sleep(0.002); end loop;
                 if ending = 'cut' then perform pg_terminate_backend(pg_backend_pid()); perform pg_sleep(1); end if;
                 raise 'injected' using errcode = ending;
             end if;
             return new;
         end $$;
         create trigger fail before insert on steadfast.events for each row execute function steadfast.fail()",
    );
    for (ending, first_hears) in [("40001", "a replay"), ("cut", "a replay"), ("23514", "an error")] {
        cluster
            .sql(&format!("update steadfast.ending set by = '{ending}'; select setval('steadfast.faults', 1, false)"));
        let id = format!("w-{ending}");
        let start = |node: &Engine| {
            let (node, id) = (node.clone(), id.clone());
            tokio::spawn(async move { node.start_request(Request::new("count").id(id).input(&7)).await })
        };
        let first = start(&nodes[0]);
        wait_for(&cluster, "select is_called from steadfast.faults", "t").await;
        let second = start(&nodes[1]);
        let second = within(second).await.unwrap().expect("the second one admits it");
        assert!(!second.replay, "{ending}");
        let heard = match within(first).await.unwrap() {
            Ok(accepted) if accepted.replay => "a replay",
            Ok(_) => "that it has admitted it too",
            Err(_) => "an error",
        };
        assert_eq!(heard, first_hears, "{ending}");
        // Whoever asks again gets the one receipt.
        let again = within(nodes[0].start_request(Request::new("count").id(&id).input(&7))).await.unwrap();
        assert!(again.replay);
        let there = format!(
            "select (select count(*) from steadfast.admissions where id = '{id}'), count(*) from steadfast.heads where id = '{id}'"
        );
        assert_eq!(cluster.sql(&there), "1|1");
    }
    verify(&nodes[0]).await;
    for node in nodes {
        node.shutdown(STUCK).await;
    }
}

/// Somebody's idle transaction keeps everything that leaves the queues in their indexes, and every claim, sweep and look
/// for the next due time walked over all of it. Now they walk over it about once a second, beside the claims, whatever
/// the number of claims; and what another node puts in further below is found all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_does_not_walk_over_what_has_left_while_an_old_snapshot_is_held() {
    const LEFT: u64 = 200_000;
    let cluster = Cluster::start(&[("autovacuum", "off")]);
    let (engine, other) = (node(&cluster.url(""), 8), node(&cluster.url(""), 0));
    within(engine.start("count", &2)).await.unwrap().result::<u32>().await.unwrap();
    let holder = cluster.url("");
    let holder = std::thread::spawn(move || {
        psql(&holder, "begin isolation level repeatable read; select 1 from steadfast.store; select pg_sleep(600)")
            .expect_err("it is ended")
    });
    let asleep = "select count(*) from pg_stat_activity where wait_event = 'PgSleep' and backend_xmin is not null";
    wait_for(&cluster, asleep, "1").await;
    cluster.sql(&format!(
        "begin;
         insert into steadfast.ready (namespace, name, step, rank, workflow)
             select 1, 'count', step, n, -n from generate_series(1, {LEFT}) n, unnest('{{start,s1}}'::text[]) step;
         insert into steadfast.timed (namespace, wake, due, workflow)
             select 1, wake, n, -n from generate_series(1, {LEFT}) n, unnest('{{0,1}}'::smallint[]) wake;
         delete from steadfast.ready where workflow < 0;
         delete from steadfast.timed where workflow < 0;
         commit;
         vacuum analyze steadfast.ready, steadfast.timed"
    ));
    cluster.sql("do $$ begin for n in 1 .. 5000 loop perform pg_current_xact_id(); commit; end loop; end $$");
    let read = |index: &str| -> u64 {
        let text = format!("select sum(idx_tup_read) from pg_stat_all_indexes where indexrelname = '{index}'");
        cluster.sql(&text).parse().expect("it is a number")
    };
    // The first claims walk over all of it, and notes say how far they came.
    let noticed = Instant::now();
    while noticed.elapsed() < Duration::from_secs(10) {
        within(within(engine.start("count", &2)).await.unwrap().result::<u32>()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let before = (read("ready_key"), read("timed_key"));
    assert!(before.0 > LEFT && before.1 > LEFT, "{before:?}: there is something to walk over");
    let began = Instant::now();
    for _ in 0..150 {
        within(within(engine.start("count", &2)).await.unwrap().result::<u32>()).await.unwrap();
    }
    // Connections tell what they have read with a delay.
    tokio::time::sleep(Duration::from_secs(12)).await;
    let looks = began.elapsed().as_secs() + 1;
    let walked = (read("ready_key") - before.0, read("timed_key") - before.1);
    // Two nodes look, each at two queues of either kind, and what they told late of the time before counts here. Every claim
    // would be a walk of its own, and every look for the next due time.
    let most = looks * LEFT * 2 * 2 * 2;
    assert!(walked.0 < most && walked.1 < most, "{walked:?} in {looks} s");

    let handle = within(other.start("count", &2).id("urgent").priority(100)).await.unwrap();
    assert_eq!(within(handle.result::<u32>()).await.unwrap(), 2);
    verify(&engine).await;
    cluster.sql("select pg_terminate_backend(pid) from pg_stat_activity where wait_event = 'PgSleep'");
    tokio::task::block_in_place(|| holder.join()).expect("the holder ends");
    within(within(engine.start("count", &2)).await.unwrap().result::<u32>()).await.unwrap();
    engine.shutdown(STUCK).await;
    other.shutdown(STUCK).await;
}
