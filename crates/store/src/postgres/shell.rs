//! Shell: statements of one's own on a store, for whoever shall not take our word for it.

use std::fmt;
use std::sync::Arc;

use futures_util::TryStreamExt;
use tokio_postgres::Row;

use super::place::Place;
use super::reader::{AT_LENGTH, Background};
use super::session::{Purpose, Session, postgres};
use crate::contract::StoreError;

/// Rows that a statement may be ahead of who reads them.
const AHEAD: usize = 1_024;

/// A connection for statements of one's own, which only read. They name tables as `{schema}.heads`.
pub struct Shell {
    place: Place,
    session: Arc<Session>,
    background: Background,
}

impl fmt::Debug for Shell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shell").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Shell {
    /// Connects.
    ///
    /// # Errors
    /// [`StoreError`] when no server can be used.
    pub fn open(url: &str) -> Result<Self, StoreError> {
        let place = Place::parse(url)?;
        let background = Background::start(&place)?;
        let session = background.wait({
            let place = place.clone();
            async move { Session::connect(&place, &Arc::default(), &[], Purpose::Look).await }
        })?;
        Ok(Self { place, session: Arc::new(session), background })
    }

    /// Whether there is a store in the schema.
    ///
    /// # Errors
    /// [`StoreError`] when it holds tables of another program, or the server says no.
    pub fn has_store(&self) -> Result<bool, StoreError> {
        let (place, session) = (self.place.clone(), self.session.clone());
        self.background.wait(async move { Ok(super::migrate::version(&session, &place).await? > 0) })
    }

    /// Runs a statement and reads its rows one after the other, however long that takes. Blocks: not for a thread of a
    /// runtime.
    ///
    /// # Errors
    /// [`StoreError`] when the server says no, and whatever `read` says.
    pub fn each<E: From<StoreError>>(&self, text: &str, mut read: impl FnMut(&Row) -> Result<(), E>) -> Result<(), E> {
        let (send, mut rows) = tokio::sync::mpsc::channel(AHEAD);
        let (text, session) = (self.place.text(text), self.session.clone());
        self.background.handle().spawn(async move {
            // Whoever reads hears of a failure, unless they are gone.
            if let Err(error) = stream(&session, &text, &send).await {
                let _ = send.send(Err(error)).await;
            }
        });
        while let Some(row) = rows.blocking_recv() {
            read(&row?)?;
        }
        Ok(())
    }
}

/// One transaction, over when this returns.
async fn stream(
    session: &Session,
    text: &str,
    send: &tokio::sync::mpsc::Sender<Result<Row, StoreError>>,
) -> Result<(), StoreError> {
    let failed = postgres("read the store");
    session.client.batch_execute(&format!("begin read only; {AT_LENGTH}")).await.map_err(&failed)?;
    let read = async {
        // Gone before the transaction ends: nothing comes through behind rows that nobody takes.
        let rows = session.client.query_typed_raw(text, std::iter::empty::<(&i32, _)>()).await?;
        let mut rows = std::pin::pin!(rows);
        while let Some(row) = rows.try_next().await? {
            if send.send(Ok(row)).await.is_err() {
                break;
            }
        }
        Ok(())
    };
    let read = read.await;
    session.client.batch_execute("rollback").await.map_err(&failed)?;
    read.map_err(&failed)
}
