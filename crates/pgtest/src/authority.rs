//! Certificates of a test.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, GeneralSubtree, IsCa,
    KeyPair, KeyUsagePurpose, NameConstraints, date_time_ymd,
};
use tempfile::TempDir;

/// One who signs certificates, and a folder with what it has signed.
#[derive(Debug)]
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: TempDir,
}

/// A certificate and its key, as files that their reader alone can read.
#[derive(Debug)]
pub struct Identity {
    /// In PEM.
    pub certificate: PathBuf,
    /// In PEM too.
    pub key: PathBuf,
}

impl Authority {
    /// A new one, whom nobody trusts yet, whatever there is under that name.
    pub fn named(name: &str) -> Self {
        Self::of(named(name, &[]))
    }

    /// One that may sign for this name and those below it alone.
    pub fn for_names_below(name: &str) -> Self {
        let mut params = named("for some names", &[]);
        let permitted_subtrees = vec![GeneralSubtree::DnsName(name.to_owned())];
        params.name_constraints = Some(NameConstraints { permitted_subtrees, excluded_subtrees: Vec::new() });
        Self::of(params)
    }

    fn of(mut params: CertificateParams) -> Self {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(params, new_key()).expect("a certificate can be signed");
        let folder = tempfile::Builder::new().prefix("steadfast-ca-").tempdir().expect("a folder for tests");
        fs::write(folder.path().join("root.crt"), issuer.pem()).expect("a file of a test can be written");
        Self { issuer, folder }
    }

    /// Its own certificate.
    pub fn root(&self) -> PathBuf {
        self.folder.path().join("root.crt")
    }

    /// For a server with these names or addresses.
    pub fn server(&self, names: &[&str]) -> Identity {
        self.sign(&for_server(names))
    }

    /// For a server whose only name is that of the subject.
    pub fn server_by_subject(&self, name: &str) -> Identity {
        let mut params = named(name, &[]);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(&params)
    }

    /// For a server with these names or addresses, from 2001.
    pub fn expired_server(&self, names: &[&str]) -> Identity {
        let mut params = for_server(names);
        (params.not_before, params.not_after) = (date_time_ymd(2001, 1, 1), date_time_ymd(2001, 12, 31));
        self.sign(&params)
    }

    /// For a role that logs in.
    pub fn client(&self, role: &str) -> Identity {
        let mut params = named(role, &[]);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(&params)
    }

    /// For a server whose only name is that of the subject, signed by itself: what `openssl req -x509` makes.
    pub fn self_signed_server(&self, name: &str) -> Identity {
        let mut params = named(name, &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = new_key();
        let certificate = params.self_signed(&key).expect("a certificate can be signed");
        self.keep(&certificate.pem(), &key)
    }

    fn sign(&self, params: &CertificateParams) -> Identity {
        let key = new_key();
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate can be signed");
        self.keep(&certificate.pem(), &key)
    }

    fn keep(&self, certificate: &str, key: &KeyPair) -> Identity {
        let count = fs::read_dir(self.folder.path()).expect("the folder of a test can be listed").count();
        let file = |kind: &str| self.folder.path().join(format!("{count}.{kind}"));
        let identity = Identity { certificate: file("crt"), key: file("key") };
        write_private(&identity.certificate, certificate);
        write_private(&identity.key, &key.serialize_pem());
        identity
    }
}

fn new_key() -> KeyPair {
    KeyPair::generate().expect("a key can be made")
}

fn for_server(names: &[&str]) -> CertificateParams {
    let mut params = named("a server of a test", names);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params
}

fn named(subject: &str, names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).expect("the names of a test can be names");
    params.distinguished_name.push(DnType::CommonName, subject);
    params
}

/// Writes a file as it has to be for a key.
pub(crate) fn write_private(path: &Path, text: &str) {
    fs::write(path, text).expect("a file of a test can be written");
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("a file of a test has permissions");
}
