//! Several engines on one database: what one of them does, the others see.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use steadfast::core::state::Status;
use steadfast::{Ctx, Engine, Error, Request, StepResult, done, step};
use steadfast_pgtest::{Authority, Bouncer, Cluster, Cut, Mode, Proxy};

const STUCK: Duration = Duration::from_secs(30);

async fn within<F: IntoFuture>(work: F) -> F::Output {
    tokio::time::timeout(STUCK, work.into_future()).await.expect("it is done in time")
}

async fn count_up(ctx: Ctx) -> StepResult {
    let to: u32 = ctx.get("input").await?.unwrap_or(3);
    let at: u32 = ctx.get("at").await?.unwrap_or(0) + 1;
    ctx.set("at", &at)?;
    if at >= to { Ok(done(at)) } else { Ok(step(format!("s{at}"))) }
}

async fn slow(_: Ctx) -> StepResult {
    tokio::time::sleep(Duration::from_secs(60)).await;
    Ok(done(0))
}

/// Waits until the workflow runs, and answers the epoch of its claim.
async fn claimed(engine: &Engine, id: &str) -> u64 {
    within(async {
        loop {
            if let Some(claim) = engine.head(id).await.unwrap().claim {
                return claim.epoch;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

/// Waits until somebody who has locked a row sleeps on it. Blocks.
fn wait_for_holder(cluster: &Cluster) {
    let begin = Instant::now();
    while cluster.sql("select count(*) from pg_stat_activity where wait_event = 'PgSleep'") != "1" {
        assert!(begin.elapsed() < STUCK, "nobody holds the row");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn node(url: &str, concurrency: usize) -> Engine {
    Engine::open(url)
        .expect("the store opens")
        .register("count", count_up)
        .register("slow", slow)
        .concurrency(concurrency)
        .run()
        .expect("it runs")
}

/// What this one admits, and another runs, does not wait for anybody's look.
async fn hints_are_heard_of(front: &Engine) {
    let begin = Instant::now();
    for n in 0..10 {
        let handle = within(front.start("count", &3).id(format!("w-{n}"))).await.unwrap();
        assert_eq!(within(handle.result::<u32>()).await.unwrap(), 3);
    }
    // Without hints each would have waited up to a second for the other node, and up to five for its end.
    assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn work_that_one_node_has_no_room_for_runs_on_another_and_its_end_is_heard() {
    let shared = steadfast_pgtest::shared();
    let url = shared.fresh_url();
    let (front, back) = (node(&url, 0), node(&url, 8));
    // Let the other one listen.
    within(front.start("count", &3).id("first")).await.unwrap();
    within(front.handle("first").end()).await.unwrap();
    hints_are_heard_of(&front).await;
    front.shutdown(STUCK).await;
    back.shutdown(STUCK).await;
}

/// BC-097: many clients admit batches of the same ids, in any order, on two nodes: each id once, nobody hears of a race.
#[tokio::test(flavor = "multi_thread")]
async fn the_same_ids_on_two_nodes_are_admitted_once() {
    let shared = steadfast_pgtest::shared();
    let url = shared.fresh_url();
    let nodes = [node(&url, 8), node(&url, 8)];
    let clients = (0..32).map(|client| {
        let node = nodes[client % 2].clone();
        async move {
            let mut accepted = 0;
            for round in 0..10 {
                // The same twenty ids, begun at another place by each client.
                let requests = (0..20).map(|n| {
                    let id = format!("r{round}-{}", (n * 7 + client * 3) % 20);
                    Request::new("count").id(id).input(&1)
                });
                for outcome in node.start_many(requests.collect()).await.unwrap() {
                    accepted += usize::from(!outcome.unwrap().replay);
                }
            }
            accepted
        }
    });
    let accepted: usize = within(futures_util::future::join_all(clients)).await.into_iter().sum();
    assert_eq!(accepted, 200, "each of 200 ids was new to one client");
    for node in nodes {
        node.shutdown(STUCK).await;
    }
}

/// Every claim goes to one worker, however many nodes reach for it.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_share_a_backlog_and_run_each_step_once() {
    let shared = steadfast_pgtest::shared();
    let url = shared.fresh_url();
    let front = node(&url, 0);
    let requests = (0..300).map(|n| Request::new("count").id(format!("w-{n}")).input(&3));
    within(front.start_many(requests.collect())).await.unwrap();
    let nodes = [node(&url, 16), node(&url, 16)];
    for n in 0..300 {
        let id = format!("w-{n}");
        assert_eq!(within(front.handle(&id).result::<u32>()).await.unwrap(), 3);
        let head = front.head(&id).await.unwrap();
        assert_eq!((head.status(), head.seq), (Status::Completed, 7), "three steps, each started and committed once");
    }
    let verified = front.look(|reader| reader.verify(&mut |_| {})).await.unwrap();
    assert_eq!(verified.fault_count, 0, "{:?}", verified.faults);
    for node in nodes.into_iter().chain([front]) {
        node.shutdown(STUCK).await;
    }
}

/// Timers are due one after the other: nodes that are idle do not all look at each of them.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_due_wakes_one_node_and_not_all() {
    let cluster = Cluster::start(&[("shared_preload_libraries", "pg_stat_statements")]);
    cluster.sql("create extension pg_stat_statements");
    let url = cluster.url("");
    let nap = |ctx: Ctx| async move {
        if ctx.step() == "woken" {
            return Ok(done(()));
        }
        let millis: u64 = ctx.get("input").await?.unwrap_or(0);
        Ok(step("woken").after(Duration::from_millis(millis)))
    };
    let sleeper = || Engine::open(&url).expect("the store opens").register("nap", nap).run().expect("it runs");
    let nodes: Vec<Engine> = (0..6).map(|_| sleeper()).collect();
    let timers = 100_u64;
    let mut reaches = Vec::new();
    // One that is overdue for a moment is reached for by others too, as when something takes the processor away; which it
    // does not do twice in a row.
    while reaches.len() < 2 && reaches.last().is_none_or(|reaches| *reaches > 3 * timers) {
        let round = reaches.len();
        for n in 0..timers {
            let node = &nodes[usize::try_from(n).unwrap() % nodes.len()];
            within(node.start("nap", &(1_500 + 25 * n)).id(format!("w{round}-{n}"))).await.unwrap();
        }
        cluster.sql("select pg_stat_statements_reset()");
        for n in 0..timers {
            within(nodes[0].handle(&format!("w{round}-{n}")).end()).await.unwrap();
        }
        let calls = "select sum(calls) from pg_stat_statements where query like '%.timed t%skip locked%'";
        reaches.push(cluster.sql(calls).parse::<u64>().expect("a sum is a number"));
    }
    let few = reaches.iter().any(|reaches| (1..=3 * timers).contains(reaches));
    assert!(few, "{reaches:?} sweeps for {timers} timers on {} nodes", nodes.len());
    for node in nodes {
        node.shutdown(STUCK).await;
    }
}

/// A notification takes a lock that all of a database's notifying transactions share: those for a thousand starts are a
/// few, in transactions of their own.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_admitted_together_is_told_of_by_few_hints() {
    let cluster = Cluster::start(&[("shared_preload_libraries", "pg_stat_statements")]);
    cluster.sql("create extension pg_stat_statements");
    let (front, back) = (node(&cluster.url(""), 0), node(&cluster.url(""), 16));
    let starts = 1_000;
    let begin = Instant::now();
    cluster.sql("select pg_stat_statements_reset()");
    for n in 0..starts {
        within(front.start("count", &1).id(format!("w-{n}"))).await.unwrap();
    }
    let took = begin.elapsed();
    for n in 0..starts {
        within(front.handle(&format!("w-{n}")).end()).await.unwrap();
    }
    let told = "select coalesce(sum(calls), 0) from pg_stat_statements where query ilike 'notify%'";
    let told: u128 = cluster.sql(told).parse().expect("a sum is a number");
    // One in 20 ms at most, from either node.
    let most = 2 * (begin.elapsed().as_millis() / 20 + 2);
    assert!((1..=most.min(starts)).contains(&told), "{told} hints for {starts} starts in {took:?}");
    // None stands in a transaction with anything else.
    let mixed = "select count(*) from pg_stat_statements where query ilike '%notify%' and query not ilike 'notify%'
                     and query not ilike '%pg_stat_statements%'";
    assert_eq!(cluster.sql(mixed), "0");
    for node in [front, back] {
        node.shutdown(STUCK).await;
    }
}

/// BC-109: the server is restarted under load; the same engine goes on, and nothing acknowledged is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_database_is_survived() {
    let cluster = Cluster::start(&[]);
    let engine = node(&cluster.url(""), 16);
    within(engine.start("count", &3).id("before")).await.unwrap();
    within(engine.handle("before").end()).await.unwrap();
    cluster.stop(Mode::Immediate);
    let refused = within(engine.start("count", &3).id("meanwhile")).await.map(drop);
    assert!(matches!(&refused, Err(Error::Store(_) | Error::OutcomeUnknown { .. })), "{refused:?}");
    assert!(!engine.is_ready());
    cluster.start_again();
    let begin = Instant::now();
    let handle = loop {
        match within(engine.start("count", &3).id("meanwhile")).await {
            Ok(handle) => break handle,
            Err(Error::Store(_) | Error::OutcomeUnknown { .. }) => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(within(handle.result::<u32>()).await.unwrap(), 3);
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    // The other committer, which had nothing to do, follows.
    while !engine.is_ready() {
        assert!(begin.elapsed() < Duration::from_secs(5), "it is not ready again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    engine.shutdown(STUCK).await;
}

/// A newer release has taken the store: a node of this one says so and is not ready, so that nobody is sent to it. When
/// it may again, it goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_a_migration_excludes_is_not_ready_and_says_why() {
    let cluster = Cluster::start(&[]);
    let engine = node(&cluster.url(""), 16);
    within(engine.start("count", &3).id("before")).await.unwrap();
    within(engine.handle("before").end()).await.unwrap();
    cluster.sql("update steadfast.store set version = 2, oldest = 2");
    let mut n = 0;
    within(async {
        while engine.is_ready() {
            let refused = engine.start("count", &3).id(format!("refused-{n}")).await.map(drop);
            assert_eq!(refused.as_ref().map_err(Error::code), Err("store_foreign"), "{refused:?}");
            n += 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    assert!(engine.refuses_writes());
    cluster.sql("update steadfast.store set version = 1, oldest = 1");
    within(engine.start("count", &3).id("after")).await.unwrap();
    within(engine.handle("after").end()).await.unwrap();
    assert!(engine.is_ready());
    assert_eq!(cluster.sql("select count(*) from steadfast.heads"), "2");
    engine.shutdown(STUCK).await;
}

/// A step that wants to read while the database is away waits for it: that is no failed attempt.
#[tokio::test(flavor = "multi_thread")]
async fn an_outage_costs_a_step_that_reads_no_attempt() {
    let cluster = Cluster::start(&[]);
    let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
    let (asked, mut asks) = tokio::sync::mpsc::unbounded_channel();
    let (go, may_go) = tokio::sync::watch::channel(false);
    let handler = move |ctx: Ctx| {
        let (begun, asked, mut may_go) = (begun.clone(), asked.clone(), may_go.clone());
        async move {
            begun.send(()).unwrap();
            may_go.wait_for(|go| *go).await.unwrap();
            let mut absent = std::pin::pin!(ctx.get::<u32>("absent"));
            let absent = tokio::select! {
                biased;
                answered = &mut absent => answered,
                () = async { asked.send(()).unwrap() } => absent.await,
            };
            Ok(done(absent?.unwrap_or(ctx.attempt())))
        }
    };
    let engine = Engine::open(&cluster.url("")).unwrap().register("reads", handler).run().unwrap();
    let never = steadfast::RetryPolicy::never();
    let handle = within(engine.start_request(Request::new("reads").id("w").retry(never))).await;
    handle.unwrap();
    within(begins.recv()).await.unwrap();
    cluster.stop(Mode::Immediate);
    go.send_replace(true);
    within(asks.recv()).await.expect("the read waits for its answer");
    cluster.start_again();
    assert_eq!(within(engine.handle("w").result::<u32>()).await.unwrap(), 1, "in its first attempt");
    engine.shutdown(STUCK).await;
}

/// The answer to a commit is lost, or the commit itself: the callers hear what became of it, and not that nobody knows.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_answer_is_cut_off_is_resolved() {
    let shared = steadfast_pgtest::shared();
    let proxy = Proxy::start(shared.port());
    let url = format!("{}&committers=1", proxy.url(&format!("schema=cut{}", std::process::id())));
    let engine = node(&url, 8);
    for (n, cut) in [Cut::After, Cut::Before, Cut::After, Cut::Before].into_iter().enumerate() {
        proxy.cut_commits(cut, 1);
        let accepted = within(engine.start_request(Request::new("count").id(format!("w-{n}")).input(&3))).await;
        let accepted = accepted.unwrap_or_else(|error| panic!("{cut:?}: {error}"));
        assert!(!accepted.replay, "{cut:?}: it was decided once");
        assert_eq!(within(engine.handle(accepted.id.as_str()).result::<u32>()).await.unwrap(), 3);
        assert_eq!(proxy.cuts(), n + 1, "the cut was made");
    }
    let verified = engine.look(|reader| reader.verify(&mut |_| {})).await.unwrap();
    assert_eq!((verified.workflows, verified.fault_count), (4, 0), "{:?}", verified.faults);
    engine.shutdown(STUCK).await;
}

/// A standby that has everything is promoted: the epoch is raised, claims of the one before are void and given back.
#[tokio::test(flavor = "multi_thread")]
async fn a_failover_raises_the_epoch_and_loses_nothing() {
    let primary = Cluster::start(&[]);
    let standby = primary.standby(true);
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", primary.port(), standby.port());
    let url = format!("postgres://steadfast@{hosts}/postgres?connect_timeout=2");
    let engine = node(&url, 4);
    within(engine.start("slow", &0).id("running")).await.unwrap();
    let before = claimed(&engine, "running").await;
    for n in 0..20 {
        within(engine.start("count", &2).id(format!("w-{n}"))).await.unwrap();
    }
    primary.kill();
    standby.promote();
    let handle = loop {
        match within(engine.start("count", &2).id("after")).await {
            Ok(handle) => break handle,
            Err(Error::Store(_) | Error::OutcomeUnknown { .. }) => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(error) => panic!("{error}"),
        }
    };
    within(handle.result::<u32>()).await.unwrap();
    for n in 0..20 {
        assert_eq!(within(engine.handle(&format!("w-{n}")).result::<u32>()).await.unwrap(), 2);
    }
    let claimed_anew = within(async {
        loop {
            let head = engine.head("running").await.unwrap();
            match head.claim {
                Some(claim) if claim.epoch > before => return claim.epoch,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    });
    assert_eq!(claimed_anew.await, before + 1, "once for all committers and nodes");
    engine.shutdown(Duration::ZERO).await;
}

/// Each server has a certificate for its own name only, and takes nothing that is not encrypted.
#[tokio::test(flavor = "multi_thread")]
async fn every_connection_is_encrypted_also_after_a_failover() {
    const ONLY_TLS: &str = "hostssl all all 127.0.0.1/32 trust";
    let authority = Authority::named("ours");
    let primary = Cluster::start(&[]);
    primary.serve_tls(&authority.server(&["a.test"]), &authority, ONLY_TLS);
    let standby = primary.standby(true);
    standby.serve_tls(&authority.server(&["b.test"]), &authority, ONLY_TLS);
    let (a, b, root) = (primary.port(), standby.port(), authority.root());
    let url = format!(
        "postgres://steadfast@a.test:{a},b.test:{b}/postgres?hostaddr=127.0.0.1,127.0.0.1&connect_timeout=2\
         &sslmode=verify-full&sslrootcert={}",
        root.display()
    );
    let engine = node(&url, 4);
    for (n, cluster) in [&primary, &primary, &standby].into_iter().enumerate() {
        match n {
            0 => {}
            1 => assert!(primary.terminate_backends() > 0),
            _ => {
                primary.kill();
                standby.promote();
            }
        }
        let id = format!("w-{n}");
        let handle = within(async {
            loop {
                match engine.start("count", &2).id(&id).await {
                    Ok(handle) => return handle,
                    Err(Error::Store(_) | Error::OutcomeUnknown { .. }) => {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        })
        .await;
        assert_eq!(within(handle.result::<u32>()).await.unwrap(), 2);
        // One that writes, one that looks and one that listens, at least, once all are back.
        let count = "from pg_stat_ssl join pg_stat_activity using (pid) where application_name = 'steadfast' and";
        let listens = format!("select count(*) {count} query like 'listen%'; select count(*) > 2 {count} true");
        within(async {
            while cluster.sql(&listens) != "1\nt" {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        assert_eq!(cluster.sql(&format!("select count(*) {count} not ssl")), "0");
    }
    engine.shutdown(STUCK).await;
}

/// A standby is promoted while the primary before it lives on and stands first in the URL: nodes went on connecting to
/// that one, each as it came.
#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_lives_on_beside_its_successor_is_left() {
    let primary = Cluster::start(&[]);
    let standby = primary.standby(false);
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", primary.port(), standby.port());
    let url = format!("postgres://steadfast@{hosts}/postgres?connect_timeout=2");
    let engine = node(&url, 4);
    within(engine.start("count", &2).id("before")).await.unwrap();
    within(engine.handle("before").end()).await.unwrap();
    let follows = "select count(*) from pg_stat_replication where replay_lsn >= pg_current_wal_lsn()";
    while primary.sql(follows) != "1" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let epoch: u64 = primary.sql("select epoch from steadfast.store").parse().unwrap();
    standby.promote();
    let promoted = Instant::now();
    for n in 0.. {
        let id = format!("early-{n}");
        let started = within(engine.start("count", &2).id(&id)).await;
        let there = standby.sql(&format!("select count(*) from steadfast.admissions where id = '{id}'"));
        if started.is_ok() && there == "1" {
            break;
        }
        assert!(promoted.elapsed() < Duration::from_secs(10), "it writes to the one before");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // What was under way elsewhere meanwhile.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let written = || {
        primary.sql(
            "select (select count(*) from steadfast.events), (select boot from steadfast.store),
                 (select max(expires_at) from steadfast.nodes)",
        )
    };
    let before = written();
    // The connections are made anew, by a node that was there and one that comes.
    standby.terminate_backends();
    let late = node(&url, 4);
    for n in 0..40 {
        let (id, node) = (format!("w-{n}"), [&engine, &late][n % 2]);
        let handle = loop {
            match within(node.start("count", &2).id(&id)).await {
                Ok(handle) => break handle,
                Err(Error::Store(_) | Error::OutcomeUnknown { .. }) => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => panic!("{error}"),
            }
        };
        assert_eq!(within(handle.result::<u32>()).await.unwrap(), 2);
    }
    // Gone, it leaves none that could be used.
    standby.stop(Mode::Immediate);
    tokio::time::sleep(Duration::from_secs(5)).await;
    within(engine.start("count", &2).id("nowhere")).await.map(drop).expect_err("the one before takes writes again");
    assert_eq!(written(), before);
    standby.start_again();
    while within(engine.start("count", &2).id("after")).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(standby.sql("select epoch from steadfast.store"), (epoch + 1).to_string());
    let verified = engine.look(|reader| reader.verify(&mut |_| {})).await.unwrap();
    assert_eq!(verified.fault_count, 0, "{:?}", verified.faults);
    assert_eq!(written(), before);
    for node in [engine, late] {
        node.shutdown(STUCK).await;
    }
}

/// Behind a pooler that lends connections by the transaction nothing may be left on a connection.
#[tokio::test(flavor = "multi_thread")]
async fn it_works_behind_a_pooler_in_transaction_mode() {
    let cluster = Cluster::start(&[]);
    let bouncer = Bouncer::start(cluster.port());
    let nodes = [node(&bouncer.url(""), 8), node(&bouncer.url(""), 8)];
    let requests = |node: usize| {
        (0..100).map(move |n| Request::new("count").id(format!("n{node}-{n}")).input(&3)).collect::<Vec<_>>()
    };
    for (n, node) in nodes.iter().enumerate() {
        within(node.start_many(requests(n))).await.unwrap();
    }
    for n in 0..2 {
        for w in 0..100 {
            let handle = nodes[1 - n].handle(&format!("n{n}-{w}"));
            assert_eq!(within(handle.result::<u32>()).await.unwrap(), 3);
        }
    }
    let verified = nodes[0].look(|reader| reader.verify(&mut |_| {})).await.unwrap();
    assert_eq!((verified.workflows, verified.fault_count), (200, 0), "{:?}", verified.faults);
    for node in nodes {
        node.shutdown(STUCK).await;
    }
}

/// Over sockets no ports can be compared: what was set for all time stayed on connections that the pooler lent to others.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_on_the_connections_of_a_pooler_behind_a_socket() {
    let cluster = Cluster::start(&[]);
    let bouncer = Bouncer::start_by_socket(&cluster);
    let nodes = [node(&bouncer.socket_url(""), 8), node(&bouncer.socket_url(""), 8)];
    for n in 0..100 {
        let start = || nodes[0].start("count", &3).id(format!("w-{n}"));
        // A committer finds out by a statement that it has prepared on another connection.
        while let Err(error) = within(start()).await {
            assert!(matches!(error, Error::Store(_)), "{error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    for n in 0..100 {
        let handle = nodes[1].handle(&format!("w-{n}"));
        assert_eq!(within(handle.result::<u32>()).await.unwrap(), 3);
    }
    // As many at once as the pooler has connections.
    let (url, settings) = (bouncer.url(""), "show enable_seqscan; select pg_sleep(0.3)");
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..5).map(|_| scope.spawn(|| steadfast_pgtest::psql(&url, settings).unwrap())).collect();
        for client in clients {
            assert_eq!(client.join().unwrap().trim(), "on");
        }
    });
    for node in nodes {
        node.shutdown(STUCK).await;
    }
}

/// A node that is gone without a word costs its workflows a node's lease, and not their own.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_gone_is_looked_after_by_another() {
    let shared = steadfast_pgtest::shared();
    let url = shared.fresh_url();
    let survivor = node(&url, 0);
    let other = node(&url, 4);
    within(other.start("slow", &0).id("running")).await.unwrap();
    claimed(&survivor, "running").await;
    // Its lease ends without a word, as that of a machine that lost its power.
    let schema = url.split_once("schema=").unwrap().1;
    let plain = url.split_once('?').unwrap().0;
    let gone = format!(
        "update {schema}.nodes set expires_at = 0, boot = boot + 1000 where node = 2;
                        update {schema}.store set boot = boot + 1000;
                        update {schema}.heads set boot = boot + 1000, revision = revision + 1 where status = 'running'"
    );
    steadfast_pgtest::psql(plain, &gone).unwrap();
    let begin = Instant::now();
    // Handed out once more: given back, and claimed by whoever has room.
    while survivor.head("running").await.unwrap().visit().map(|visit| visit.delivery) != Some(2) {
        assert!(begin.elapsed() < STUCK, "nobody has given it back");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    other.shutdown(Duration::ZERO).await;
    survivor.shutdown(STUCK).await;
}

/// A database that was away for longer than a node's lease: when it was back, each node found every lease over, its own
/// included, and gave back what healthy nodes were running.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_long_outage_nobody_counts_as_gone() {
    let cluster = Cluster::start(&[]);
    let nodes = [node(&cluster.url(""), 1), node(&cluster.url(""), 1)];
    for (n, node) in nodes.iter().enumerate() {
        within(node.start("slow", &0).id(format!("w-{n}"))).await.unwrap();
        claimed(node, &format!("w-{n}")).await;
    }
    let known = || cluster.sql("select node, boot from steadfast.nodes order by node");
    let before = known();
    // Long enough for leases of others to count, where a node has just begun.
    tokio::time::sleep(Duration::from_secs(16)).await;
    cluster.stop(Mode::Immediate);
    tokio::time::sleep(Duration::from_secs(17)).await;
    cluster.start_again();
    tokio::time::sleep(Duration::from_secs(10)).await;
    for (n, node) in nodes.iter().enumerate() {
        assert!(node.is_ready());
        let head = within(node.head(&format!("w-{n}"))).await.unwrap();
        assert_eq!(head.visit().map(|visit| visit.delivery), Some(1), "w-{n} goes on where it was");
    }
    assert_eq!(known(), before);
    for node in nodes {
        node.shutdown(Duration::ZERO).await;
    }
}

/// Somebody at a database shell locked one row: for as long as it was held nothing else was answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_somebody_holds_keeps_nobody_else_waiting() {
    let cluster = Cluster::start(&[]);
    let engine = Engine::open(&cluster.url("committers=1"))
        .unwrap()
        .register("count", count_up)
        .register("slow", slow)
        .lease(Duration::from_secs(6))
        .run()
        .unwrap();
    for id in ["held", "free"] {
        within(engine.start("slow", &0).id(id)).await.unwrap();
        claimed(&engine, id).await;
    }
    std::thread::scope(|scope| {
        let holder = scope.spawn(|| {
            cluster
                .sql("begin; select 1 from steadfast.heads where id = 'held' for update; select pg_sleep(12); commit")
        });
        tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(async {
                wait_for_holder(&cluster);
                let begin = Instant::now();
                let cancelling = tokio::spawn({
                    let engine = engine.clone();
                    async move { engine.cancel("held", "enough", "test").await }
                });
                let mut n = 0;
                let mut longest = Duration::ZERO;
                while begin.elapsed() < Duration::from_secs(10) {
                    let asked = Instant::now();
                    let handle = within(engine.start("count", &2).id(format!("w-{n}"))).await.unwrap();
                    assert_eq!(within(handle.result::<u32>()).await.unwrap(), 2);
                    longest = longest.max(asked.elapsed());
                    n += 1;
                }
                assert!(longest < Duration::from_secs(4), "others waited for {longest:?}");
                assert!(!cancelling.is_finished(), "the row is still held");
                let cancelled = within(cancelling).await.unwrap().unwrap();
                assert_eq!(engine.head("held").await.unwrap().status(), Status::Cancelled, "{cancelled:?}");
                // Its heartbeat was not held up by that of the other.
                let head = engine.head("free").await.unwrap();
                assert_eq!(head.visit().map(|visit| visit.delivery), Some(1));
            });
        });
        holder.join().unwrap();
    });
    engine.shutdown(Duration::ZERO).await;
}

/// A machine that vanished within a batch left its rows locked: the survivor passed over them, forgot the node, and the
/// workflow waited for its lease.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_locked_when_its_node_was_gone_is_given_back_later() {
    let cluster = Cluster::start(&[]);
    let url = cluster.url("");
    let survivor = node(&url, 0);
    let other = node(&url, 4);
    within(other.start("slow", &0).id("running")).await.unwrap();
    claimed(&survivor, "running").await;
    // As if a third one had claimed it.
    cluster.sql(
        "update steadfast.store set boot = boot + 1000; update steadfast.heads set boot = 1002, revision = revision + 1 where id = 'running'",
    );
    std::thread::scope(|scope| {
        scope.spawn(|| {
            cluster
                .sql("begin; select 1 from steadfast.heads where id = 'running' for update; select pg_sleep(5); commit")
        });
        wait_for_holder(&cluster);
        // A process of this machine whose number nobody has.
        cluster.sql(
            "insert into steadfast.nodes (node, boot, label, machine, pid, born, started_at, expires_at)
                 select 9, 1002, label, machine, 2147483646, 1, started_at, 0 from steadfast.nodes where node = 2",
        );
    });
    let begin = Instant::now();
    while survivor.head("running").await.unwrap().visit().map(|visit| visit.delivery) != Some(2) {
        assert!(begin.elapsed() < Duration::from_secs(20), "nobody has given it back");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // And then it is forgotten.
    while cluster.sql("select count(*) from steadfast.nodes where node = 9") != "0" {
        assert!(begin.elapsed() < STUCK, "it is never forgotten");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    other.shutdown(Duration::ZERO).await;
    survivor.shutdown(STUCK).await;
}

/// A network that swallows everything: a look waited for ever, and with enough of them nobody looked any more, for nodes
/// that are gone neither.
#[tokio::test(flavor = "multi_thread")]
async fn a_look_at_a_server_that_says_nothing_ends() {
    let shared = steadfast_pgtest::shared();
    let proxy = Proxy::start(shared.port());
    let (_, schema) = shared.fresh_url().split_once("schema=").map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
    let engine = node(&proxy.url(&format!("schema={schema}")), 2);
    let handle = within(engine.start("count", &1).id("w")).await.unwrap();
    assert_eq!(within(handle.result::<u32>()).await.unwrap(), 1);
    proxy.stall(true);
    let looks = futures_util::future::join_all((0..4).map(|_| engine.head("w")));
    let looked = tokio::time::timeout(Duration::from_secs(45), looks).await.expect("looks end");
    for look in looked {
        assert_eq!(look.expect_err("nothing was said").code(), "store_unavailable");
    }
    proxy.stall(false);
    assert_eq!(within(engine.head("w")).await.unwrap().status(), Status::Completed);
    engine.shutdown(STUCK).await;
}

/// No more than eight looks ran at the same time, whatever the URL said.
#[tokio::test(flavor = "multi_thread")]
async fn as_many_looks_run_at_once_as_the_url_says() {
    let shared = steadfast_pgtest::shared();
    let engine = node(&format!("{}&looks=20", shared.fresh_url()), 0);
    let (running, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let looks = (0..16).map(|_| {
        let (running, most) = (running.clone(), most.clone());
        engine.look(move |_| {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let begin = Instant::now();
            while most.load(Ordering::SeqCst) < 16 && begin.elapsed() < Duration::from_secs(2) {
                std::thread::sleep(Duration::from_millis(5));
            }
            running.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        })
    });
    within(futures_util::future::try_join_all(looks)).await.unwrap();
    assert_eq!(most.load(Ordering::SeqCst), 16);
    engine.shutdown(STUCK).await;
}

/// A node that only admits said of every start that no worker knows it, and showed what others were about to run as
/// blocked.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_says_that_no_worker_knows_a_step_while_another_node_might() {
    let shared = steadfast_pgtest::shared();
    let url = shared.fresh_url();
    let back = node(&url, 0);
    let front = Engine::open(&url).unwrap().run().unwrap();
    let start = async |id: &str| within(front.start_request(Request::new("count").id(id))).await.unwrap();
    assert!(start("w-0").await.known);
    assert!(!front.is_blocked(&front.head("w-0").await.unwrap()));
    back.shutdown(STUCK).await;
    let begin = Instant::now();
    while !front.is_blocked(&front.head("w-0").await.unwrap()) {
        assert!(begin.elapsed() < STUCK, "it does not see that it is alone");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(!start("w-1").await.known);
    front.shutdown(STUCK).await;
}

/// A connection that listens was lost, and nobody made it anew. Cut again and again, nodes find each other's work when
/// they look; left in peace, they hear of it as before.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_cannot_listen_for_a_while_hear_each_other_again() {
    let shared = steadfast_pgtest::shared();
    let url = shared.fresh_url();
    let (plain, schema) = url.split_once("?schema=").unwrap();
    let url = format!("{url}&application_name={schema}");
    let (front, back) = (node(&url, 0), node(&url, 8));
    // What such a connection has said last: nobody else says these, nor nothing.
    let listeners = |what: &str| -> usize {
        let text = format!(
            "select count(*) {what} from pg_stat_activity
             where application_name = '{schema}' and (query = '' or query ~ '^(listen|notify) ')"
        );
        steadfast_pgtest::psql(plain, &text).unwrap().trim().parse().unwrap()
    };
    let (mut cuts, mut handles) = (0, Vec::new());
    for round in 0..40 {
        cuts += listeners("filter (where pg_terminate_backend(pid))");
        if round % 4 == 0 {
            handles.push(within(front.start("count", &3).id(format!("cut-{round}"))).await.unwrap());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(cuts >= 4, "each was cut more than once: {cuts}");
    for handle in handles {
        assert_eq!(within(handle.result::<u32>()).await.unwrap(), 3);
    }
    let begin = Instant::now();
    while listeners("") != 2 {
        assert!(begin.elapsed() < STUCK, "they do not listen again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    hints_are_heard_of(&front).await;
    front.shutdown(STUCK).await;
    back.shutdown(STUCK).await;
}

/// A cancel had no effect on a running step whose worker could only poll: it hears of it by its heartbeat.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_behind_a_pooler_hears_of_a_cancel_with_its_heartbeat() {
    const LEASE: Duration = Duration::from_secs(6);
    let shared = steadfast_pgtest::shared();
    let url = shared.fresh_url();
    let (_, schema) = url.split_once('?').unwrap();
    let bouncer = Bouncer::start(shared.port());
    let front = node(&url, 0);
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let handler = move |ctx: Ctx| {
        let tell = tell.clone();
        async move {
            tell.send("begun").unwrap();
            ctx.cancelled().await;
            tell.send("cancelled").unwrap();
            Ok(done(0))
        }
    };
    let builder = Engine::open(&bouncer.url(schema)).unwrap().register("waits", handler);
    let worker = builder.lease(LEASE).run().unwrap();
    within(front.start("waits", &()).id("w")).await.unwrap();
    assert_eq!(within(told.recv()).await, Some("begun"));
    let asked = Instant::now();
    within(front.cancel("w", "enough", "test")).await.unwrap();
    assert_eq!(within(told.recv()).await, Some("cancelled"));
    // A beat comes in each third of a lease.
    assert!(asked.elapsed() < LEASE, "it heard after {:?}", asked.elapsed());
    assert_eq!(within(front.head("w")).await.unwrap().status(), Status::Cancelled);
    for node in [front, worker] {
        node.shutdown(STUCK).await;
    }
}
