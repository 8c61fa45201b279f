//! Migrations: numbered, each in one transaction, run by any number of nodes without harm.
//!
//! # Versions
//! The store says which version its schema has and the oldest release that may still use it. A release that is behind
//! goes on working while that allows it, so that nodes can be replaced one by one; one that is ahead migrates.
//!
//! # Online
//! A migration waits for no lock longer than two seconds: whatever stands behind a waiting schema change would wait
//! with it. It then tries again. The lock that lets one node migrate at a time belongs to its transaction, so that it
//! never outlives the node.

use std::time::Duration;

use steadfast_core::fingerprint::FingerprintKey;
use tokio_postgres::error::SqlState;

use super::place::Place;
use super::session::{Session, postgres};
use crate::contract::StoreError;

/// Every migration, in order.
pub(super) const MIGRATIONS: [&str; 1] = [include_str!("../../migrations/postgres/0001_spine.sql")];

/// The oldest release, by the schema it knows, that may use a store after all of these.
const OLDEST: i32 = 1;
/// How often a migration that meets a lock is tried, and how long it rests between.
const TRIES: u32 = 30;
const REST: Duration = Duration::from_millis(500);

/// Makes the schema where it is not there. `if not exists` would ask for the right to make one all the same, which who
/// was given a schema need not have.
const CREATE_SCHEMA: &str =
    "do $$ begin if to_regnamespace('{schema}') is null then create schema {schema}; end if; end $$";

/// A migration's text for `place`. Where it says `{partitioned:TABLE:COLUMN};` at the end of a table, that table is hashed
/// by that column into as many partitions as are asked for.
fn text(place: &Place, migration: &str) -> String {
    let Some(pieces) = place.partitions else {
        return place.text(&replace_partitioned(migration, |_, _| ";".to_owned()));
    };
    place.text(&replace_partitioned(migration, |table, column| {
        let parts = (0..pieces).map(|piece| {
            format!(
                "\ncreate table {{schema}}.{table}_{piece} partition of {{schema}}.{table}
                     for values with (modulus {pieces}, remainder {piece});"
            )
        });
        format!("partition by hash ({column});{}", parts.collect::<String>())
    }))
}

fn replace_partitioned(migration: &str, with: impl Fn(&str, &str) -> String) -> String {
    let mut pieces = migration.split("{partitioned:");
    let mut text = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (named, rest) = piece.split_once("};").expect("a migration of ours says which table");
        let (table, column) = named.split_once(':').expect("and which column");
        text += &with(table, column);
        text += rest;
    }
    text
}

/// The version of the schema that this release knows.
pub(super) fn known() -> i32 {
    i32::try_from(MIGRATIONS.len()).expect("there are few migrations")
}

/// The version of the store's schema, 0 when there is none.
pub(super) async fn version(session: &Session, place: &Place) -> Result<i32, StoreError> {
    let doing = "look for the store's schema";
    let there = session
        .client
        .query_typed(
            &place.text(
                "select to_regclass('{schema}.store') is not null,
                        exists (select from pg_class c where c.relnamespace = to_regnamespace('{schema}'))",
            ),
            &[],
        )
        .await
        .map_err(postgres(doing))?;
    let (store, others) = there.first().map_or((false, false), |row| (row.get(0), row.get(1)));
    let foreign = |problem: String| StoreError::Foreign { path: place.to_string().into(), problem };
    if !store {
        if others {
            return Err(foreign("its schema holds tables of another program; give another schema".to_owned()));
        }
        return Ok(0);
    }
    let rows = session
        .client
        .query_typed(&place.text("select version, oldest from {schema}.store"), &[])
        .await
        .map_err(postgres(doing))?;
    let (version, oldest) = rows.first().map_or((0, 0), |row| (row.get::<_, i32>(0), row.get::<_, i32>(1)));
    may_use(place, oldest)?;
    Ok(version)
}

/// # Errors
/// [`StoreError::Foreign`] when the store needs a later release than this one. A running node finds out with its next
/// batch.
pub(super) fn may_use(place: &Place, oldest: i32) -> Result<(), StoreError> {
    if oldest <= known() {
        return Ok(());
    }
    let problem = format!(
        "it needs a release that knows version {oldest} of its schema or later, this one knows {}; use a newer release",
        known()
    );
    Err(StoreError::Foreign { path: place.to_string().into(), problem })
}

/// Brings the store to this release's schema. Answers the version it had.
///
/// # Errors
/// [`StoreError`] when it is another program's schema or another release's, or when a lock is held for long.
pub(super) async fn migrate(
    session: &Session,
    place: &Place,
    secret: FingerprintKey,
    now: i64,
) -> Result<i32, StoreError> {
    let had = version(session, place).await?;
    for number in had + 1..=known() {
        let mut tries = 0;
        loop {
            tries += 1;
            match one(session, place, number, secret, now).await {
                Ok(()) => break,
                Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) && tries < TRIES => {
                    tracing::warn!(number, tries, "a migration waits for a lock on the store's tables");
                    session.client.batch_execute("rollback").await.map_err(postgres("migrate the store"))?;
                    tokio::time::sleep(REST).await;
                }
                Err(source) => {
                    let error = postgres("migrate the store")(source);
                    // The connection may be gone too.
                    let _ = session.client.batch_execute("rollback").await;
                    return Err(error);
                }
            }
        }
    }
    Ok(had)
}

async fn one(
    session: &Session,
    place: &Place,
    number: i32,
    secret: FingerprintKey,
    now: i64,
) -> Result<(), tokio_postgres::Error> {
    let client = &session.client;
    // Whoever is first does it; the others find it done.
    let lock = format!(
        "begin; set local lock_timeout = '60s'; select pg_advisory_xact_lock(hashtextextended('steadfast migrations', 0)); \
         set local lock_timeout = '2s'; {}",
        place.text(CREATE_SCHEMA)
    );
    client.batch_execute(&lock).await?;
    let version = if number == 1 {
        let text = place.text("select to_regclass('{schema}.store') is not null");
        i32::from(client.query_typed(&text, &[]).await?.first().is_some_and(|row| row.get(0)))
    } else {
        let text = place.text("select version from {schema}.store for update");
        client.query_typed(&text, &[]).await?.first().map_or(0, |row| row.get(0))
    };
    if version < number {
        let migration = usize::try_from(number - 1).ok().and_then(|n| MIGRATIONS.get(n)).expect("it is one of ours");
        client.batch_execute(&text(place, migration)).await?;
        client.batch_execute(&noted(place, number, secret, now)).await?;
    }
    client.batch_execute("commit").await
}

/// What notes that a migration was carried out; with the first one comes the store's row.
fn noted(place: &Place, number: i32, secret: FingerprintKey, now: i64) -> String {
    if number > 1 {
        return place.text(&format!("update {{schema}}.store set version = {number}, oldest = {OLDEST}"));
    }
    place.text(&format!(
        "insert into {{schema}}.store (version, oldest, epoch, boot, system, timeline, copied, fingerprint_key,
             created_at) values (1, {OLDEST}, 1, 0, '', 0, false, '\\x{}', {now})",
        secret.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    ))
}

/// Makes an empty store in the transaction that is open.
pub(super) async fn make(
    session: &Session,
    place: &Place,
    secret: FingerprintKey,
    now: i64,
) -> Result<(), tokio_postgres::Error> {
    session.client.batch_execute(&place.text(CREATE_SCHEMA)).await?;
    for (number, migration) in (1..).zip(MIGRATIONS) {
        session.client.batch_execute(&text(place, migration)).await?;
        session.client.batch_execute(&noted(place, number, secret, now)).await?;
    }
    Ok(())
}
