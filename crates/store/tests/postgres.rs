//! What is about PostgreSQL alone: plans, schema, damage, and what two connections do to each other.

mod harness;

use std::collections::BTreeMap;
use std::sync::Arc;

use harness::{Partitioned, Postgres, SECRET};
use steadfast_core::sweep::Boots;
use steadfast_core::text::Namespace;
use steadfast_pgtest::{Cluster, psql};
use steadfast_store::clock::ManualClock;
use steadfast_store::conformance::{DAY_ONE, Diary};
use steadfast_store::postgres::{self, PostgresReader, PostgresStore};
use steadfast_store::{Filter, Reader, Store, StoreError};

/// The server's URL without our own parameters, and the schema.
fn parts(url: &str) -> (String, String) {
    let (base, schema) = url.split_once("?schema=").expect("the harness names a schema");
    let schema = schema.split('&').next().unwrap_or(schema);
    (base.to_owned(), schema.to_owned())
}

fn sql(url: &str, text: &str) -> String {
    let (base, schema) = parts(url);
    psql(&base, &text.replace("{schema}", &schema)).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn open(url: &str) -> Result<PostgresStore, StoreError> {
    PostgresStore::open_with(url, Arc::new(ManualClock::new(DAY_ONE)), || Ok(SECRET))
}

/// How each statement of an empty store at `url` finds its rows, by the statement's name.
fn scans(url: &str) -> BTreeMap<String, Vec<String>> {
    drop(open(url).expect("the store opens"));
    sql(
        url,
        "vacuum analyze {schema}.heads, {schema}.events, {schema}.scratchpad, {schema}.admissions,
                       {schema}.ready, {schema}.timed, {schema}.ended_badly, {schema}.claim_calls",
    );
    let mut scans: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, plan) in postgres::plans(url).expect("statements are explained") {
        let how = plan
            .lines()
            .map(str::trim)
            .map(|line| line.trim_start_matches("-> ").trim())
            .filter(|line| {
                line.contains("Scan")
                    || line.starts_with("Index Cond")
                    || line.starts_with("Filter")
                    || line.starts_with("Conflict Arbiter")
            })
            .filter(|line| {
                !line.contains("Function Scan")
                    && !line.contains("CTE Scan")
                    && !line.contains("Subquery Scan")
                    && !line.contains("namespaces")
                    && !line.contains("WorkTable")
            })
            .map(|line| line.split("  (cost").next().unwrap_or(line).to_owned())
            .collect();
        scans.insert(name, how);
    }
    // They look at the catalogue alone.
    scans.remove("look Bytes");
    for (name, how) in &scans {
        let all = how.join("\n");
        assert!(
            !all.contains("Seq Scan on heads") && !all.contains("Seq Scan on events"),
            "{name} walks a table:\n{all}"
        );
        assert!(!all.contains("Bitmap"), "{name} makes a bitmap:\n{all}");
    }
    scans
}

/// Every statement of writers and looks, planned while the tables are empty and freshly analysed, where any plan looks as
/// good as another: each table is reached by the key that names its rows.
#[test]
fn every_statement_has_its_plan_whatever_the_statistics_say() {
    insta::assert_debug_snapshot!(scans(&Postgres::default().url));
}

/// With logs and receipts in partitions each row is looked up by the index of its own.
#[test]
fn every_statement_has_its_plan_in_a_partitioned_store() {
    let partitioned = Partitioned::default();
    let url = &partitioned.0.url;
    drop(open(url).expect("the store opens"));
    let parts = sql(
        url,
        "select string_agg(c.relname, ' ' order by c.oid) from pg_inherits i join pg_class c on c.oid = i.inhrelid
         where c.relkind = 'r' and c.relnamespace = '{schema}'::regnamespace",
    );
    assert_eq!(parts, "admissions_0 admissions_1 admissions_2 events_0 events_1 events_2");
    let (whole, parted) = (scans(&Postgres::default().url), scans(url));
    let mut met = 0;
    for (name, how) in &whole {
        for (table, key) in [("events", "events_key on events"), ("admissions", "admissions_key on admissions")] {
            let looked_up = |how: &[String], key: &str| how.iter().filter(|line| line.contains(key)).count();
            let by_key = looked_up(how, key);
            let of_parts =
                (0..3).map(|part| looked_up(&parted[name], &format!("{table}_{part}_pkey on {table}_{part}")));
            let of_parts = of_parts.collect::<Vec<_>>();
            // Where the row is known beforehand, the plan shows the other partitions no more, and for no row none of them.
            assert!(of_parts == [by_key; 3] || of_parts == [0; 3], "{name}: {:#?}", parted[name]);
            met += of_parts[2];
        }
    }
    assert!(met > 3, "{parted:#?}");
}

#[test]
fn the_schema() {
    let harness = Postgres::default();
    drop(open(&harness.url).expect("the store opens"));
    let columns = sql(
        &harness.url,
        "select c.table_name || '.' || c.column_name || ' ' || c.data_type || case when c.is_nullable = 'NO' then ' not null' else '' end
                || coalesce(' collate ' || c.collation_name, '')
         from information_schema.columns c where c.table_schema = '{schema}' order by c.table_name, c.ordinal_position",
    );
    let indexes = sql(
        &harness.url,
        "select replace(indexdef, '{schema}.', '') from pg_indexes where schemaname = '{schema}' order by indexname",
    );
    insta::assert_snapshot!(format!("{columns}\n\n{indexes}"));
    // What each row is distributed by opens every key; no name is longer than PostgreSQL keeps it.
    let longest =
        sql(&harness.url, "select max(length(relname)) from pg_class where relnamespace = '{schema}'::regnamespace");
    assert!(longest.trim().parse::<u32>().expect("a number") <= 63);
}

#[test]
fn damage_is_found() {
    let harness = Postgres::default();
    let url = harness.url.clone();
    let mut diary = Diary::begin(Box::new(harness));
    diary.say_all(&[
        "start w1",
        "start w2",
        "start w3",
        "claim a",
        "complete w1@1 to pay $x=1",
        "start w4",
        "start w5",
        "claim b",
        "start w6",
        "cancel w6",
    ]);
    let reader = PostgresReader::open(&url).expect("the store is there");
    let found = |statement: &str| {
        sql(&url, statement);
        let verified = reader.verify(&mut |_| {}).expect("it can be verified");
        verified.faults.iter().map(|fault| format!("{} {}", fault.key.id, fault.code)).collect::<Vec<_>>().join(", ")
    };
    assert_eq!(found("select 1"), "");
    for (statement, faults) in [
        ("update {schema}.heads set seq = seq + 1 where id = 'w1'", "w1"),
        ("update {schema}.scratchpad set value = '2' where key = 'x'", "variable"),
        (
            "delete from {schema}.ready where workflow = (select workflow from {schema}.heads where id = 'w2')",
            "ready_without_row",
        ),
        (
            "insert into {schema}.ready (namespace, workflow, name, step, rank) values (1, 77, 'a', 'start', 1)",
            "row_without_ready",
        ),
        ("delete from {schema}.timed", "timed_without_row"),
        ("insert into {schema}.timed (namespace, workflow, wake, due) values (1, 77, 0, 1)", "row_without_timed"),
        ("delete from {schema}.ended_badly", "ended_badly_without_row"),
        (
            "insert into {schema}.ended_badly (namespace, workflow, status) values (1, 77, 'failed')",
            "row_without_ended_badly",
        ),
        ("delete from {schema}.admissions where id = 'w3'", "head_without_receipt"),
        ("delete from {schema}.heads where id = 'w4'", "log_without_head"),
        ("update {schema}.heads set status = 'nonsense' where id = 'w5'", "head_unreadable"),
        (
            "update {schema}.events set payload = '{' where seq = 0 and workflow = (select workflow from {schema}.heads where id = 'w3')",
            "event_unreadable",
        ),
    ] {
        let all = found(statement);
        assert!(all.contains(faults), "{statement}: {all}");
    }
    std::mem::forget(diary);
}

/// What one node has written while another one decided is found by the key, not overwritten.
#[test]
fn who_comes_second_is_told_to_decide_anew() {
    use steadfast_core::command::{Command, Moment};
    use steadfast_store::conformance::{Applied, apply};
    let harness = Postgres::default();
    let (one, other) = (open(&harness.url).expect("it opens"), open(&harness.url).expect("several nodes may open it"));
    let start = |value: &str| {
        let asked = steadfast_core::admission::Asked {
            key: steadfast_core::text::WorkflowKey {
                namespace: Namespace::default_namespace(),
                id: steadfast_core::text::WorkflowId::trusted("w1"),
            },
            name: steadfast_core::text::Name::trusted("a"),
            input: steadfast_core::json::Json::trusted(value),
            writes: steadfast_core::event::Writes::default(),
            options: steadfast_core::options::StartOptions::default(),
        };
        let limits = steadfast_core::limits::Limits::default();
        Command::Start(Box::new(asked.check(&Default::default(), &SECRET, &limits).expect("it is well formed")))
    };
    let moment = Moment { now: DAY_ONE, epoch: 1 };
    // Both look before either writes: the second to write meets the first one's key.
    let barrier = std::sync::Barrier::new(2);
    let outcomes: Vec<Applied> = std::thread::scope(|scope| {
        let race = |store: &PostgresStore, value: &'static str| {
            let (barrier, command) = (&barrier, start(value));
            let mut writer = store.writer().expect("it has a writer");
            move || {
                barrier.wait();
                let mut tries = 0;
                loop {
                    match apply(writer.as_mut(), &moment, std::slice::from_ref(&command)) {
                        Applied::NotCommitted(StoreError::Raced { .. }) if tries < 10 => tries += 1,
                        applied => return applied,
                    }
                }
            }
        };
        let threads = [scope.spawn(race(&one, "1")), scope.spawn(race(&other, "2"))];
        threads.into_iter().map(|thread| thread.join().expect("no rule panics")).collect()
    });
    let committed = outcomes.iter().filter(|applied| matches!(applied, Applied::Committed(_))).count();
    let unchanged = outcomes.iter().filter(|applied| matches!(applied, Applied::Unchanged(_))).count();
    assert_eq!((committed, unchanged), (1, 1), "one is new, the other a conflict: {outcomes:?}");
}

#[test]
fn nodes_have_numbers_of_their_own_and_know_each_other() {
    let harness = Postgres::default();
    let one = open(&harness.url).expect("it opens");
    let two = open(&harness.url).expect("it opens");
    assert_eq!((one.node(), two.node()), (1, 2));
    assert_eq!(one.boots().expect("nodes are listed"), Boots { until: 2, alive: [1, 2].into() });
    drop(one);
    assert_eq!(two.boots().expect("nodes are listed"), Boots { until: 2, alive: [2].into() });
    let again = open(&harness.url).expect("it opens");
    assert_eq!((again.node(), again.identity().boot), (1, 3), "a number is free again, a boot never");
}

/// BC-100: five servers that start at the same instant on an empty database make one store.
#[test]
fn servers_that_start_together_make_one_store() {
    let harness = Postgres::default();
    let stores: Vec<PostgresStore> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..5).map(|_| scope.spawn(|| open(&harness.url))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic").expect("it opens")).collect()
    });
    let boots: std::collections::BTreeSet<u64> = stores.iter().map(|store| store.identity().boot).collect();
    assert_eq!(boots, (1..=5).collect());
}

#[test]
fn what_is_not_ours_or_newer_is_refused() {
    let harness = Postgres::default();
    sql(&harness.url, "create schema {schema}; create table {schema}.other (n int)");
    assert_eq!(open(&harness.url).expect_err("it holds another program's table").code(), "store_foreign");
    let harness = Postgres::default();
    drop(open(&harness.url).expect("it opens"));
    assert_eq!(postgres::migrate(&harness.url).expect("it can be migrated twice"), (1, 1));
    sql(&harness.url, "update {schema}.store set version = 2, oldest = 1");
    drop(open(&harness.url).expect("a newer schema that allows this release is used"));
    sql(&harness.url, "update {schema}.store set oldest = 2");
    assert_eq!(open(&harness.url).expect_err("it is too new").code(), "store_foreign");
    let nowhere = open("postgres://steadfast@127.0.0.1:1/postgres?connect_timeout=1").expect_err("nobody listens");
    assert_eq!(nowhere.code(), "store_unavailable");
}

/// BC-101: a migration that another session holds up gives way and tries again; it leaves no lock behind.
#[test]
fn a_migration_waits_for_no_lock_for_long() {
    let cluster = Cluster::start(&[]);
    let url = cluster.url("");
    let folder = std::thread::scope(|scope| {
        // Somebody holds the lock of migrations for a while, and is then gone.
        let holder = scope.spawn(|| {
            cluster.sql("select pg_advisory_lock(hashtextextended('steadfast migrations', 0)); select pg_sleep(3)")
        });
        std::thread::sleep(std::time::Duration::from_millis(500));
        let begin = std::time::Instant::now();
        let migrated = postgres::migrate(&url);
        holder.join().expect("psql ends");
        (migrated, begin.elapsed())
    });
    assert_eq!(folder.0.expect("it is done when the lock is free"), (0, 1));
    assert!(folder.1 < std::time::Duration::from_secs(20));
    let reader = PostgresReader::open(&url).expect("the store is there");
    assert_eq!(reader.list(&Filter::all(Namespace::default_namespace()), None, 10).expect("it lists").items, []);
}

/// An idle transaction of somebody else kept every dead row, and nobody was told. Whoever looks sees how old it is, or at
/// least, as a role that may not see when others began, how many transactions ago.
#[test]
fn the_oldest_snapshot_is_seen_whoever_holds_it() {
    let cluster = Cluster::start(&[]);
    cluster.sql("create role app login; create schema own authorization app; create role other superuser login");
    let url = |role: &str| cluster.url("schema=own").replace("steadfast@", &format!("{role}@"));
    drop(open(&url("app")).expect("the store opens"));
    let (own, all) = (PostgresReader::open(&url("app")), PostgresReader::open(&cluster.url("schema=own")));
    let (own, all) = (own.expect("the store is there"), all.expect("the store is there"));
    let oldest = |reader: &PostgresReader| reader.oldest_snapshot().expect("it looks").expect("others can hold one");
    let began = std::time::Instant::now();
    let calm = oldest(&all);
    assert!(calm.age.is_none_or(|age| age < std::time::Duration::from_secs(60)), "{calm:?}");
    std::thread::scope(|scope| {
        let holder = cluster.url("").replace("steadfast@", "other@");
        scope.spawn(move || {
            let text = "begin isolation level repeatable read; select 1 from own.store; select pg_sleep(600)";
            psql(&holder, text).expect_err("it is ended")
        });
        let asleep = "select count(*) from pg_stat_activity where wait_event = 'PgSleep' and backend_xmin is not null";
        while cluster.sql(asleep) != "1" {
            assert!(began.elapsed() < std::time::Duration::from_secs(60), "nobody holds a snapshot");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let held = std::time::Instant::now();
        (0..50).for_each(|_| drop(cluster.sql("select pg_current_xact_id()")));
        let least = held.elapsed();
        let (seen, hidden) = (oldest(&all), oldest(&own));
        assert!(seen.transactions >= 50 && seen.age.is_some_and(|age| age >= least), "{seen:?}");
        assert!(hidden.transactions >= 50 && hidden.age.is_none(), "{hidden:?}");
        cluster.sql("select pg_terminate_backend(pid) from pg_stat_activity where wait_event = 'PgSleep'");
    });
    let begin = std::time::Instant::now();
    while oldest(&all).transactions >= 50 {
        assert!(begin.elapsed() < std::time::Duration::from_secs(30), "it is told for ever");
    }
}
