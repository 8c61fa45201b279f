//! TLS: which connections are encrypted, and what the server at the other end has to prove.
//!
//! # Modes
//! Names and meanings are those of libpq; see [`Mode`]. A connection through a socket in the file system is never
//! encrypted, whatever the mode.
//!
//! # Files
//! They are read whenever a connection is made, so what is renewed on the disk counts for the next one. The roots of
//! the system are read once.
//!
//! # What a certificate has to be
//! Chains and names are judged as for the web. Beside that three things are taken which libpq takes and the web does not:
//! a certificate that is itself among the given roots, a name in the subject where there is none in its place, and, where
//! nobody is verified and TLS 1.3 is spoken, a certificate of version 1.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature,
    verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};
use sha2::{Digest, Sha256, Sha384, Sha512};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::config::SslMode;
use tokio_postgres::error::SqlState;
use tokio_postgres::tls::{ChannelBinding, TlsConnect};
use tokio_rustls::TlsConnector;
use x509_cert::Certificate;
use x509_cert::der::{Decode, Encode};
use x509_cert::ext::pkix::name::GeneralName;
use x509_cert::ext::pkix::{NameConstraints, SubjectAltName};

/// `sslmode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Mode {
    /// Never encrypted.
    Disable,
    /// Only where the server turns away what is not.
    Allow,
    /// Where the server can; the default.
    Prefer,
    /// Always. Who the server is nobody checks, unless roots are given.
    Require,
    /// And the server has a certificate from one of the roots.
    VerifyCa,
    /// And it is for the name in the URL.
    VerifyFull,
}

const MODES: [(&str, Mode); 6] = [
    ("disable", Mode::Disable),
    ("allow", Mode::Allow),
    ("prefer", Mode::Prefer),
    ("require", Mode::Require),
    ("verify-ca", Mode::VerifyCa),
    ("verify-full", Mode::VerifyFull),
];

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MODES.iter().find(|(_, mode)| mode == self).map_or("", |(name, _)| name))
    }
}

/// Whose certificates are trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Roots {
    System,
    File(PathBuf),
}

/// A certificate of our own.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Own {
    certificate: PathBuf,
    key: PathBuf,
}

/// What a URL says of TLS.
#[derive(Debug, Default)]
pub(super) struct Settings {
    mode: Option<Mode>,
    /// `ssl=true`, as others write it, and libpq takes it.
    ssl: bool,
    roots: Option<Roots>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl Settings {
    /// Takes a setting of libpq's name and meaning; false when it is none of these. Of two that differ libpq takes the
    /// last; here nobody loses the stricter one by oversight.
    pub(super) fn set(&mut self, name: &str, value: &str) -> Result<bool, String> {
        let given = match name {
            "sslmode" => self.mode.is_some(),
            "sslrootcert" => self.roots.is_some(),
            "sslcert" => self.certificate.is_some(),
            "sslkey" => self.key.is_some(),
            _ => false,
        };
        if given {
            return Err(format!("{name} is given twice; leave one out"));
        }
        let path = || match percent_encoding::percent_decode_str(value).decode_utf8() {
            Ok(path) if !path.is_empty() => Ok(PathBuf::from(path.as_ref())),
            _ => Err(format!("{name} is {value:?}; give the path of a file")),
        };
        match name {
            "sslmode" => {
                let known = MODES.iter().find(|(name, _)| *name == value);
                let names = || MODES.map(|(name, _)| name).join(", ");
                self.mode = Some(known.ok_or_else(|| format!("sslmode is {value:?}; give one of {}", names()))?.1);
            }
            "ssl" if value == "true" => self.ssl = true,
            "sslrootcert" if value == "system" => self.roots = Some(Roots::System),
            "sslrootcert" => self.roots = Some(Roots::File(path()?)),
            "sslcert" => self.certificate = Some(path()?),
            "sslkey" => self.key = Some(path()?),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// How connections are encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tls {
    mode: Mode,
    roots: Option<Roots>,
    own: Option<Own>,
}

impl Default for Tls {
    fn default() -> Self {
        Self { mode: Mode::Prefer, roots: None, own: None }
    }
}

/// The roots of the system, hundreds of files: they change when it is updated, and a restart reads them again.
static SYSTEM: LazyLock<RootCertStore> = LazyLock::new(|| {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    store
});

impl TryFrom<Settings> for Tls {
    type Error = String;

    /// Puts together what belongs together, and reads the files to see that they can be used.
    fn try_from(settings: Settings) -> Result<Self, String> {
        let Settings { mode, ssl, roots, certificate, key } = settings;
        let own = match (certificate, key) {
            (Some(certificate), Some(key)) => Some(Own { certificate, key }),
            (None, None) => None,
            (Some(_), None) => return Err("sslcert is given without its key; give sslkey too".to_owned()),
            (None, Some(_)) => return Err("sslkey is given without its certificate; give sslcert too".to_owned()),
        };
        let unless_told = match roots {
            Some(Roots::System) => Mode::VerifyFull,
            _ if ssl => Mode::Require,
            _ => Mode::Prefer,
        };
        if let Some(mode) = mode.filter(|mode| ssl && *mode < Mode::Require) {
            return Err(format!("ssl=true and sslmode={mode} contradict each other; leave one out"));
        }
        let mode = match (mode.unwrap_or(unless_told), &roots) {
            // Anybody can have a certificate from one of them, for a name of his own.
            (mode, Some(Roots::System)) if mode < Mode::VerifyFull => {
                return Err(format!("sslmode is {mode} with sslrootcert=system; give sslmode=verify-full"));
            }
            (mode, Some(Roots::File(_))) if mode < Mode::Require => {
                return Err(format!(
                    "sslrootcert is given, and with sslmode={mode} nobody would be kept out; give sslmode=verify-full"
                ));
            }
            (Mode::Require, Some(_)) => Mode::VerifyCa,
            (mode @ (Mode::VerifyCa | Mode::VerifyFull), None) => {
                return Err(format!(
                    "sslmode is {mode} without roots to verify by; \
                     give sslrootcert=PATH with the server's CA, or sslrootcert=system"
                ));
            }
            (mode, _) => mode,
        };
        if mode == Mode::Disable && own.is_some() {
            return Err("sslcert is given, and sslmode=disable has no use for it; leave one of them out".to_owned());
        }
        let tls = Self { mode, roots, own };
        if tls.roots.is_some() || tls.own.is_some() {
            tls.config()?;
        }
        Ok(tls)
    }
}

impl Tls {
    /// How often a connection is tried, and how.
    pub(super) fn tries(&self) -> &'static [SslMode] {
        match self.mode {
            Mode::Disable => &[SslMode::Disable],
            Mode::Allow => &[SslMode::Disable, SslMode::Require],
            Mode::Prefer => &[SslMode::Prefer, SslMode::Disable],
            Mode::Require | Mode::VerifyCa | Mode::VerifyFull => &[SslMode::Require],
        }
    }

    /// What encrypts one connection to a host of this name at this address.
    pub(super) fn connector(&self, host: &str, address: IpAddr) -> Result<Connector, String> {
        let name = match ServerName::try_from(host.to_owned()) {
            Ok(name) => name,
            Err(_) if self.mode < Mode::VerifyFull => ServerName::IpAddress(address.into()),
            Err(_) => return Err(format!("no certificate can be for the name {host:?}; {WEAKER}")),
        };
        Ok(Connector { config: Arc::new(self.config()?), name })
    }

    fn config(&self) -> Result<ClientConfig, String> {
        let provider = Arc::new(ring::default_provider());
        let verifier = Verifier {
            trust: self.roots.as_ref().map(Trust::read).transpose()?,
            checks_name: self.mode == Mode::VerifyFull,
            algorithms: provider.signature_verification_algorithms,
        };
        let config = builder(provider)?.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
        let Some(own) = &self.own else { return Ok(config.with_no_client_auth()) };
        let (chain, key) = own.read()?;
        let refused = |error| format!("sslcert and sslkey cannot be used together: {error}");
        config.with_client_auth_cert(chain, key).map_err(refused)
    }

    /// What went wrong with a connection, where it is about TLS, and what to do about it.
    pub(super) fn told(&self, error: &tokio_postgres::Error, tried: SslMode) -> Option<String> {
        let source = std::error::Error::source(error)?;
        if let Some(error) = refused(error) {
            return Some(self.refusal(error));
        }
        if let Some(db) = error.as_db_error() {
            // There is no code for it.
            let is_about = ["pg_hba.conf", "SSL", "TLS", "insecure"].iter().any(|word| db.message().contains(word));
            return (tried == SslMode::Disable && self.mode == Mode::Disable && is_about).then(|| {
                format!("{source}; where the server wants TLS, give sslmode=require, or verify-full with sslrootcert")
            });
        }
        (source.to_string() == "server does not support TLS").then(|| {
            format!(
                "it offers no TLS, and sslmode={} asks for it; set `ssl = on` there, or name another port",
                self.mode
            )
        })
    }

    fn refusal(&self, error: &Error) -> String {
        use CertificateError::{
            BadSignature, Expired, ExpiredContext, NotValidYet, NotValidYetContext, Other, UnknownIssuer,
        };
        match error {
            Error::InvalidCertificate(Other(other)) if other.0.is::<Said>() => format!("its certificate {other}"),
            Error::InvalidCertificate(Expired | ExpiredContext { .. }) => {
                "its certificate has expired; give the server a new one".to_owned()
            }
            Error::InvalidCertificate(NotValidYet | NotValidYetContext { .. }) => {
                "its certificate is not valid yet; compare the clocks of both machines".to_owned()
            }
            // A bad signature is what a CA shows that was made anew under its old name.
            Error::InvalidCertificate(UnknownIssuer | BadSignature) => match &self.roots {
                Some(Roots::File(path)) => format!(
                    "its certificate is from no CA in {}; give the CA that it is from as sslrootcert",
                    path.display()
                ),
                Some(Roots::System) => "its certificate is from no CA that the system trusts; \
                                        give the CA that it is from as sslrootcert=PATH"
                    .to_owned(),
                None => "its certificate is not its own; somebody may be in between".to_owned(),
            },
            Error::InvalidCertificate(other) => format!("its certificate is refused: {other}"),
            Error::AlertReceived(
                alert @ (AlertDescription::BadCertificate
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::CertificateRevoked
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateUnknown
                | AlertDescription::CertificateRequired
                | AlertDescription::UnknownCA),
            ) => {
                format!("it refuses our certificate ({alert:?}); give one that it accepts as sslcert and sslkey")
            }
            other => format!("no TLS came about: {other}"),
        }
    }
}

/// What TLS itself said no to.
fn refused(error: &tokio_postgres::Error) -> Option<&Error> {
    std::error::Error::source(error)?.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref::<Error>()
}

/// True when the other way, with TLS or without, may be let in where this one was not. A password that was refused is
/// not sent again, and where the server is only away, it is asked the same when it comes back.
pub(super) fn may_go_otherwise(error: &tokio_postgres::Error) -> bool {
    match error.code() {
        Some(code) if *code == SqlState::INVALID_PASSWORD => false,
        // The second is how PgBouncer says it.
        Some(code) => code.code().starts_with("28") || *code == SqlState::PROTOCOL_VIOLATION,
        None => refused(error).is_some(),
    }
}

const OLD: &str = "is of an old form (X.509 version 1 or 2); make it anew with an extension, such as its name";
const WEAKER: &str = "connect by a name that it is for, or give sslmode=verify-ca";

fn builder(
    provider: Arc<CryptoProvider>,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>, String> {
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())
}

// --- files ------------------------------------------------------------------------------------------------------------

impl Own {
    fn read(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), String> {
        let chain = certificates("sslcert", &self.certificate)?;
        let path = self.key.display();
        is_private(&self.key)?;
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|error| match error {
            rustls::pki_types::pem::Error::NoItemsFound => {
                format!("sslkey {path} holds no key; give one in PEM that no passphrase protects")
            }
            error => format!("sslkey {path} cannot be read: {error}"),
        })?;
        Ok((chain, key))
    }
}

/// As libpq asks for it.
#[cfg(unix)]
fn is_private(key: &Path) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt;
    let path = key.display();
    let found = std::fs::metadata(key).map_err(|error| format!("sslkey {path} cannot be read: {error}"))?;
    // One of root's may be read by a group, as it lies beside programs that run as others.
    let others = if found.uid() == 0 { 0o037 } else { 0o077 };
    if found.mode() & others != 0 {
        return Err(format!("sslkey {path} can be used by others; chmod 0600 it, or 0640 where it is root's"));
    }
    Ok(())
}

#[cfg(not(unix))]
fn is_private(_: &Path) -> Result<(), String> {
    Ok(())
}

fn certificates(name: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let shown = path.display();
    match read {
        Ok(found) if found.is_empty() => Err(format!("{name} {shown} holds no certificate; give one in PEM")),
        Ok(found) => Ok(found),
        Err(error) => Err(format!("{name} {shown} cannot be read: {error}")),
    }
}

// --- verifying --------------------------------------------------------------------------------------------------------

/// Who is trusted.
#[derive(Debug)]
struct Trust {
    store: RootCertStore,
    /// Given one by one, so that a server may have one of them itself.
    given: Vec<CertificateDer<'static>>,
}

impl Trust {
    fn read(roots: &Roots) -> Result<Self, String> {
        match roots {
            Roots::System if SYSTEM.is_empty() => {
                Err("sslrootcert is system, which has no roots; install ca-certificates, or give a path".to_owned())
            }
            Roots::System => Ok(Self { store: SYSTEM.clone(), given: Vec::new() }),
            Roots::File(path) => {
                let given = certificates("sslrootcert", path)?;
                let mut store = RootCertStore::empty();
                if store.add_parsable_certificates(given.iter().cloned()).0 == 0 {
                    return Err(format!("sslrootcert {} holds no certificate that can be used", path.display()));
                }
                Ok(Self { store, given })
            }
        }
    }
}

#[derive(Debug)]
struct Verifier {
    /// `None` trusts everybody.
    trust: Option<Trust>,
    checks_name: bool,
    algorithms: WebPkiSupportedAlgorithms,
}

/// A sentence about a certificate, which goes behind "its certificate".
#[derive(Debug)]
struct Said(String);

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Said {}

fn said(what: impl Into<String>) -> Error {
    Error::InvalidCertificate(CertificateError::Other(rustls::OtherError(Arc::new(Said(what.into())))))
}

impl Verifier {
    /// Checks that a certificate comes from one who is trusted.
    fn verify_chain(
        &self,
        trust: &Trust,
        der: &CertificateDer<'_>,
        certificate: &Certificate,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        let body = certificate.tbs_certificate();
        if trust.given.iter().any(|given| given.as_ref() == der.as_ref()) {
            let (from, to) = (body.validity().not_before, body.validity().not_after);
            return match now.as_secs() {
                now if now < from.to_unix_duration().as_secs() => Err(CertificateError::NotValidYet.into()),
                now if now > to.to_unix_duration().as_secs() => Err(CertificateError::Expired.into()),
                _ => Ok(()),
            };
        }
        if body.issuer() == body.subject() {
            return Err(said("is signed by itself; give that very certificate as sslrootcert to trust it"));
        }
        if body.version() != x509_cert::Version::V3 {
            return Err(said(OLD));
        }
        let parsed = ParsedCertificate::try_from(der)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &trust.store, intermediates, now, algorithms)
    }
}

/// Checks that a certificate is for a host. Where the place for names is empty, the subject's counts, but not with roots
/// of the system, which have given up that custom, nor under a CA that may certify some names alone: that is judged by
/// names in their place.
fn verify_name(
    trust: &Trust,
    der: &CertificateDer<'_>,
    certificate: &Certificate,
    intermediates: &[CertificateDer<'_>],
    host: &ServerName<'_>,
) -> Result<(), Error> {
    let names = Names::of(certificate)?;
    let is_constrained = || trust.given.iter().chain(intermediates).any(constrains_names);
    let is_for_it = match &names {
        Names::InPlace(_) => verify_server_name(&ParsedCertificate::try_from(der)?, host).is_ok(),
        Names::Subject(Some(name)) if !trust.given.is_empty() => is_for(name, host) && !is_constrained(),
        Names::Subject(_) => false,
    };
    if is_for_it {
        return Ok(());
    }
    Err(said(match names {
        Names::InPlace(names) => format!("is for {} and not for {}; {WEAKER}", names.join(", "), host.to_str()),
        Names::Subject(Some(name)) if is_for(&name, host) && !trust.given.is_empty() => {
            format!(
                "is for {name} alone by its subject, and its CA has limits; name it in its place, or give sslmode=verify-ca"
            )
        }
        Names::Subject(Some(name)) => format!("is for {name} and not for {}; {WEAKER}", host.to_str()),
        Names::Subject(None) => format!("is for no name, and so not for {}; {WEAKER}", host.to_str()),
    }))
}

/// The hosts that a certificate is for.
enum Names {
    /// Where they belong.
    InPlace(Vec<String>),
    /// The common name of the subject.
    Subject(Option<String>),
}

impl Names {
    fn of(certificate: &Certificate) -> Result<Self, Error> {
        let body = certificate.tbs_certificate();
        let name = |name: &GeneralName| match name {
            GeneralName::DnsName(name) => Some(name.to_string()),
            GeneralName::IpAddress(bytes) => {
                let bytes = bytes.as_bytes();
                let v4 = || <[u8; 4]>::try_from(bytes).map(IpAddr::from);
                <[u8; 16]>::try_from(bytes).map(IpAddr::from).or_else(|_| v4()).ok().map(|ip| ip.to_string())
            }
            _ => None,
        };
        let found = body.get_extension::<SubjectAltName>().map_err(|_| CertificateError::BadEncoding)?;
        let names: Vec<String> = found.iter().flat_map(|(_, names)| &names.0).filter_map(name).collect();
        if !names.is_empty() {
            return Ok(Self::InPlace(names));
        }
        Ok(Self::Subject(body.subject().common_name().ok().flatten().map(|name| name.value().into_owned())))
    }
}

/// Whether a CA's certificate limits the names that it may certify, as far as it can be read.
fn constrains_names(der: &CertificateDer<'_>) -> bool {
    !Certificate::from_der(der)
        .is_ok_and(|read| matches!(read.tbs_certificate().get_extension::<NameConstraints>(), Ok(None)))
}

/// Whether a name of a certificate is that of a host; a star stands for its first part.
fn is_for(name: &str, host: &ServerName<'_>) -> bool {
    let text = host.to_str();
    let by_star = || match (name.strip_prefix("*."), text.split_once('.')) {
        (Some(name), Some((_, rest))) => matches!(host, ServerName::DnsName(_)) && name.eq_ignore_ascii_case(rest),
        _ => false,
    };
    name.eq_ignore_ascii_case(&text) || by_star()
}

fn read(der: &CertificateDer<'_>) -> Result<Certificate, Error> {
    Certificate::from_der(der).map_err(|_| CertificateError::BadEncoding.into())
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if let Some(trust) = &self.trust {
            let certificate = read(end_entity)?;
            self.verify_chain(trust, end_entity, &certificate, intermediates, now)?;
            if self.checks_name {
                verify_name(trust, end_entity, &certificate, intermediates, server_name)?;
            }
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        if read(cert).is_ok_and(|certificate| certificate.tbs_certificate().version() != x509_cert::Version::V3) {
            return Err(said(OLD));
        }
        verify_tls12_signature(message, cert, dss, &self.algorithms)
    }

    /// Also where nobody is verified: a password's channel is bound to the certificate, so whoever shows one has to own
    /// it. By the bare key, so that the certificate's version does not matter.
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let Ok(certificate) = read(cert) else { return verify_tls13_signature(message, cert, dss, &self.algorithms) };
        let key = certificate.tbs_certificate().subject_public_key_info().to_der();
        let key = SubjectPublicKeyInfoDer::from(key.map_err(|_| CertificateError::BadEncoding)?);
        verify_tls13_signature_with_raw_key(message, &key, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

// --- the connection ---------------------------------------------------------------------------------------------------

/// Encrypts one connection.
pub(super) struct Connector {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> TlsConnect<S> for Connector {
    type Stream = Stream<S>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Stream<S>>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        let handshake = TlsConnector::from(self.config).connect(self.name, stream);
        Box::pin(async move { Ok(Stream(handshake.await?)) })
    }
}

/// An encrypted connection.
pub(super) struct Stream<S>(tokio_rustls::client::TlsStream<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> tokio_postgres::tls::TlsStream for Stream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        let certificate = self.0.get_ref().1.peer_certificates().and_then(<[_]>::first);
        certificate.and_then(end_point).map_or_else(ChannelBinding::none, ChannelBinding::tls_server_end_point)
    }
}

/// The certificate's digest as RFC 5929 wants it: by the hash of its signature, or by SHA-256 where that is too old.
/// Signatures that name no hash, as Ed25519 has them, have none.
fn end_point(der: &CertificateDer<'_>) -> Option<Vec<u8>> {
    let certificate = Certificate::from_der(der).ok()?;
    Some(match certificate.signature_algorithm().oid.to_string().as_str() {
        // RSA and ECDSA with MD5, SHA-1 and SHA-256.
        "1.2.840.113549.1.1.4"
        | "1.2.840.113549.1.1.5"
        | "1.2.840.10045.4.1"
        | "1.2.840.113549.1.1.11"
        | "1.2.840.10045.4.3.2" => Sha256::digest(der).to_vec(),
        "1.2.840.113549.1.1.12" | "1.2.840.10045.4.3.3" => Sha384::digest(der).to_vec(),
        "1.2.840.113549.1.1.13" | "1.2.840.10045.4.3.4" => Sha512::digest(der).to_vec(),
        _ => return None,
    })
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Stream<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Stream<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
